"""Forward and backward over packed micro-batches, with any loss of the logits: what SFT and RL share.

Sequences lie end to end in one row and see themselves alone (block-diagonal attention, positions from 0), so
a result does not depend on which sequences share a row. Losses come as shares of the loss of the whole global
batch, divided by counts that are known before the step: their sum over micro-batches and ranks is the loss.
Shapes: b rows, s row length, v padded vocabulary, t TP size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from megatron_tlt import device
from megatron_tlt.ops.packing import MicroBatch, build_micro_batch
from megatron_tlt.parallel import Parallel
from megatron_tlt.train.step import clip_and_update

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

LogitsFunction = Callable[[int, torch.Tensor], tuple[torch.Tensor, object]]
"""(number of the micro-batch, its logits `[b, s, v/t]`) -> (its share of the loss, scalar; its report)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStep:
    """What one optimizer step did, the same on every rank but for the reports."""

    grad_norm: float
    """Global norm before clipping."""
    finite: bool
    """Loss shares and gradient norm were finite on every rank."""
    updated: bool
    """False when a non-finite value, or the caller's veto, kept the optimizer from stepping."""
    reports: list
    """This rank's reports, one a micro-batch; empty off the last pipeline stage."""


def build_micro_batches(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    plan: Sequence[Sequence[int]],
    *,
    parallel: Parallel,
    packed: bool = True,
) -> list[MicroBatch]:
    """This rank's micro-batches on its device. `plan[m]` holds the sequence numbers of micro-batch m.

    A pipeline's micro-batches are padded to one shape; sequence parallelism needs a multiple of TP.
    """
    tp = parallel.config.tensor_model_parallel_size
    pad_to = 0
    if parallel.config.pipeline_model_parallel_size > 1:
        lengths = [[len(prompts[i]) + len(responses[i]) for i in members] for members in plan]
        pad_to = max((sum if packed else max)(x or [1]) for x in lengths)
    batches = [
        build_micro_batch(
            prompts,
            responses,
            members,
            packed=packed,
            pad_to=pad_to,
            pad_multiple=tp if parallel.config.sequence_parallel else 1,
        )
        for members in plan
    ]
    return [on_device(batch) for batch in batches] if device.is_cuda() else batches


def on_device(batch: MicroBatch) -> MicroBatch:
    """The same with its tensors on the device."""
    moved = {
        f.name: getattr(batch, f.name).to(device.device(), non_blocking=True)
        for f in fields(batch)
        if isinstance(getattr(batch, f.name), torch.Tensor)
    }
    return replace(batch, **moved)


def packed_seq_params(batch: MicroBatch) -> PackedSeqParams | None:
    """megatron-core's description of a packed row; None for one sequence a row."""
    if not batch.packed:
        return None
    longest = int(batch.cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _forward_step(
    function: LogitsFunction, batches: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module
):
    """Megatron's forward step: the next micro-batch through the model chunk."""
    number, batch = next(batches)
    output = model(
        batch.tokens, batch.position_ids, None, packed_seq_params=packed_seq_params(batch)
    )  # logits [b, s, v/t] on the last stage, hidden states [s, b, h] elsewhere
    return output, partial(_share_of_loss, function, number)


def _share_of_loss(function: LogitsFunction, number: int, logits: torch.Tensor):
    """Megatron's loss function: (loss, number of tokens, report); the number of tokens has no use here."""
    loss, report = function(number, logits)
    return loss, torch.zeros((), dtype=torch.int, device=logits.device), report


def run_packed(
    chunks: list[torch.nn.Module],
    batches: list[MicroBatch],
    function: LogitsFunction,
    *,
    parallel: Parallel,
    forward_only: bool,
) -> list:
    """megatron-core's schedule (none, 1F1B or interleaved) over `batches`: the reports, on the last stage.

    Every rank of a pipeline passes the same batches. Data-parallel ranks may have different numbers of them
    unless gradient reduction is overlapped, for no collective between replicas runs before the end.
    """
    rows, width = batches[0].tokens.shape
    config = parallel.config
    schedule = get_forward_backward_func(
        config.pipeline_model_parallel_size,
        config.num_model_chunks if config.num_model_chunks > 1 else None,
    )
    iterators = [enumerate(batches) for _ in chunks]
    return schedule(
        forward_step_func=partial(_forward_step, function),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=width,
        micro_batch_size=rows,
        forward_only=forward_only,
    )


def attach_packed_finalizer(chunks: list[DistributedDataParallel], parallel: Parallel) -> None:
    """Sum gradients over our groups at the end of a step, without dividing them by a number of tokens."""

    def finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **options) -> None:
        finalize_model_grads(model, None, **options | {"pg_collection": parallel.groups})

    chunks[0].config.finalize_model_grads_func = finalize


def packed_train_step(
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    batches: list[MicroBatch],
    function: LogitsFunction,
    *,
    parallel: Parallel,
    veto: Callable[[list], bool] | None = None,
) -> PackedStep:
    """Forward, backward, and one update if every rank's losses and the gradient norm are finite.

    The loss share that `function` returns is what is differentiated. `veto(reports)` may forbid the update
    on any rank.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    finite = []

    def watched(number: int, logits: torch.Tensor) -> tuple[torch.Tensor, object]:
        loss, report = function(number, logits)
        finite.append(torch.isfinite(loss.detach()))
        return loss, report

    reports = run_packed(chunks, batches, watched, parallel=parallel, forward_only=False)
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    good = math.isfinite(grad_norm) and all(bool(x) for x in finite)
    vetoed = veto is not None and veto(reports)
    bad = torch.tensor([float(not good), float(vetoed)], device=device.device())
    dist.all_reduce(bad)
    updated = not bool(bad.any())
    if updated:
        clip_and_update(optimizer, grad_norm)
    return PackedStep(
        grad_norm=grad_norm, finite=float(bad[0]) == 0.0, updated=updated, reports=reports
    )
