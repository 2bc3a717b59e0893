#!/usr/bin/env bash
# Several nodes; the same command on each: launch/torchrun_multi.sh --config run.yaml [--key value ...]
# NNODES, NODE_RANK (0 on the node that MASTER_ADDR names), MASTER_ADDR (as the other nodes know it).
# MASTER_PORT: default 20000 + JOB_ID % 20000, or 29500 without JOB_ID; the port after it is used, too.
# MODULE: what to run, default megatron_tlt.pretrain; megatron_tlt.sft, megatron_tlt.rl.
# NPROC_PER_NODE: ranks on this node; default: its GPUs, or 1. JOIN_TIMEOUT: seconds to wait for all nodes.
# With several network cards the one that leads to MASTER_ADDR is taken; set GLOO_SOCKET_IFNAME and
# NCCL_SOCKET_IFNAME to take another. Exit codes: as launch/torchrun_single.sh.
set -euo pipefail
: "${NNODES:?number of nodes}" "${NODE_RANK:?rank of this node, 0 to NNODES-1}"
: "${MASTER_ADDR:?host name or address of node 0}"
gpus=$(nvidia-smi -L 2> /dev/null | wc -l || true)
nproc="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
port="${MASTER_PORT:-$((${JOB_ID:-9500} % 20000 + 20000))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# NCCL keeps its last collectives and writes them down when one hangs.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
exec "${PYTHON:-python}" -m megatron_tlt.launcher --nnodes "$NNODES" --node_rank "$NODE_RANK" \
    --nproc_per_node "$nproc" --master_addr "$MASTER_ADDR" --master_port "$port" \
    --join_timeout "${JOIN_TIMEOUT:-600}" --max_restarts "${MAX_RESTARTS:-0}" \
    -m "${MODULE:-megatron_tlt.pretrain}" "$@"
