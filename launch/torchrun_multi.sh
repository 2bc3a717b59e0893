#!/usr/bin/env bash
# Several nodes; the same command on each: launch/torchrun_multi.sh --config run.yaml [--key value ...]
# NNODES, NODE_RANK (0 on the node that MASTER_ADDR names), MASTER_ADDR; MASTER_PORT defaults to 29500,
# NPROC_PER_NODE to the GPUs of the node, or 1. With several network cards set GLOO_SOCKET_IFNAME and
# NCCL_SOCKET_IFNAME to the one that reaches the other nodes.
set -euo pipefail
: "${NNODES:?number of nodes}" "${NODE_RANK:?rank of this node, 0 to NNODES-1}"
: "${MASTER_ADDR:?host name or address of node 0}"
gpus=$(nvidia-smi -L 2> /dev/null | wc -l || true)
nproc="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "$NNODES" --node_rank "$NODE_RANK" \
    --nproc_per_node "$nproc" --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" \
    -m megatron_tlt.pretrain "$@"
