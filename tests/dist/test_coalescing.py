"""The data-parallel collectives that megatron-core coalesces, as they run on gloo."""

import time

import torch
import torch.distributed as dist

from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron.core.distributed import param_and_grad_buffer

from tests.dist.workers import run_distributed

SHARD = 4096
SECONDS = 6.0  # torch's own coalescing aborts in malloc() well within this on four ranks


def traffic() -> tuple[int, bool]:
    """Gather and reduce through megatron-core's coalescing, several at once, until the time is up."""
    init_parallel(ParallelConfig(), seed=1)
    rank, size, rounds, right = dist.get_rank(), dist.get_world_size(), 0, True
    ranks = torch.arange(size, dtype=torch.float32)
    deadline, go_on = time.monotonic() + SECONDS, torch.ones(1)
    while go_on.item() > 0:
        buffers = [torch.empty(2, size * SHARD) for _ in range(8)]
        works = [gather(buffer, rank, number) for number, buffer in enumerate(buffers)]
        scalar = torch.ones(1)
        dist.all_reduce(scalar)
        for work in works:
            work.wait()
        for number, buffer in enumerate(buffers):
            expected = (ranks + 10 * number).repeat_interleave(SHARD)
            right = right and torch.equal(buffer, expected.expand(2, -1)) and scalar.item() == size
        right = right and scattered_sum(buffers[0], rank) == size * (rank + 0.0)
        rounds += 1
        go_on.fill_(float(time.monotonic() < deadline))
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
    return rounds, right


def shard(buffer: torch.Tensor, rank: int) -> torch.Tensor:
    return buffer[rank * SHARD : (rank + 1) * SHARD]


def gather(buffer: torch.Tensor, rank: int, number: int):
    """Start the all-gather of both rows of `buffer` [2, size * SHARD] and return what to wait for."""
    with param_and_grad_buffer._coalescing_manager(dist.group.WORLD, async_ops=True) as works:
        for row in buffer:
            shard(row, rank).fill_(rank + 10 * number)
            dist.all_gather_into_tensor(row, shard(row, rank), async_op=True)
    return works


def scattered_sum(buffer: torch.Tensor, rank: int) -> float:
    """The one value in this rank's shard of the sum of everybody's first row, reduced synchronously."""
    with param_and_grad_buffer._coalescing_manager(dist.group.WORLD):
        dist.reduce_scatter_tensor(shard(buffer[0], rank), buffer[0])
    (value,) = set(shard(buffer[0], rank).tolist())
    return value


def test_coalesced_collectives_are_right_and_survive_other_traffic_on_their_group():
    results = run_distributed(traffic, 4)
    assert len({rounds for rounds, _ in results}) == 1
    assert all(rounds > 10 and right for rounds, right in results)
