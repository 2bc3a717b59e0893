#!/usr/bin/env bash
# One node: launch/torchrun_single.sh --config run.yaml [--key value ...]
# MODULE: what to run, default megatron_tlt.pretrain; megatron_tlt.sft, megatron_tlt.rl.
# NPROC_PER_NODE: ranks on this node; default: its GPUs, or 1. MAX_RESTARTS: how often the ranks are started
# again from the last checkpoint when one fails; default 0.
# Exit code: 0 finished, 4 saved on a signal and to be continued by the same command, others: README.
set -euo pipefail
gpus=$(nvidia-smi -L 2> /dev/null | wc -l || true)
nproc="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# NCCL keeps its last collectives and writes them down when one hangs.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
exec "${PYTHON:-python}" -m megatron_tlt.launcher --standalone --nproc_per_node "$nproc" \
    --max_restarts "${MAX_RESTARTS:-0}" -m "${MODULE:-megatron_tlt.pretrain}" "$@"
