"""One training step: forward and backward over the micro-batches, agreement, clipping, update.

The loss is a mean over the tokens of the whole global batch (numerator and denominator are summed over
micro-batches and data-parallel ranks before the division), so it does not depend on how the batch is cut.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from megatron_tlt import device
from megatron_tlt.models.fp8_linear import DelayedScaling
from megatron_tlt.parallel import Parallel
from megatron_tlt.train.optimizer import inner_optimizers

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did, the same on every rank. Example: loss 3.21, grad_norm 0.87, updated True."""

    loss: float
    """Mean over the tokens of the global batch, nats; NaN or infinity are passed on as they are."""
    num_tokens: int
    """Tokens that counted."""
    grad_norm: float
    """Global norm before clipping."""
    finite_loss: bool
    finite_grad_norm: bool
    updated: bool
    """False when a non-finite value kept the optimizer from stepping."""


def loss_of_batch(loss_mask: torch.Tensor, losses: torch.Tensor):
    """Megatron's loss function: (sum over tokens, number of tokens, report); losses `[b, s]`.

    The report is a copy: the schedule divides the returned sum in place afterwards.
    """
    total = (losses * loss_mask).sum()
    tokens = loss_mask.sum().to(torch.int)
    return total, tokens, torch.stack((total.detach().clone(), tokens.to(total.dtype)))


def joined(batches: list[Batch], count: int) -> list[Batch]:
    """Each `count` micro-batches `[b, s]` in a row made one of `[count b, s]`."""
    if count == 1:
        return batches
    assert len(batches) % count == 0, (len(batches), count)
    groups = [batches[i : i + count] for i in range(0, len(batches), count)]
    return [{name: torch.cat([part[name] for part in group]) for name in group[0]} for group in groups]


def forward_step(batches: Iterator[Batch], model: torch.nn.Module):
    """Megatron's forward step: next micro-batch through the model chunk."""
    batch = next(batches)
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch.get("labels")
    )  # [b, s] on the last stage, hidden states [s, b, h] elsewhere
    return losses, partial(loss_of_batch, batch["loss_mask"])


def run_microbatches(
    chunks: list[torch.nn.Module],
    batches: list[Batch],
    *,
    parallel: Parallel,
    forward_only: bool,
) -> torch.Tensor:
    """Run megatron-core's schedule (none, 1F1B or interleaved) over `batches` of `[b, s]` tensors.

    Returns this rank's `[2]` sum of (loss, tokens), float32: zero off the last stage and off the first
    TP rank, so that a sum over the world counts every token once.
    """
    batch_size, seq_length = batches[0]["tokens"].shape
    config = parallel.config
    schedule = get_forward_backward_func(
        config.pipeline_model_parallel_size,
        config.num_model_chunks if config.num_model_chunks > 1 else None,
    )
    iterators = [iter(batches) for _ in chunks]
    reports = schedule(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=seq_length,
        micro_batch_size=batch_size,
        forward_only=forward_only,
    )
    if not reports or parallel.tp_rank != 0:
        return torch.zeros(2, device=device.device())
    return torch.stack(reports).sum(dim=0).float()


def train_step(
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    batches: list[Batch],
    *,
    parallel: Parallel,
) -> StepResult:
    """Forward, backward, and one optimizer update if loss and gradient norm are finite on all ranks."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    sums = run_microbatches(chunks, batches, parallel=parallel, forward_only=False)
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    # One all-reduce brings the global loss to every rank and makes all of them agree on the step.
    report = torch.cat((sums, sums.new_tensor([0.0 if math.isfinite(grad_norm) else 1.0])))
    dist.all_reduce(report)
    loss_sum, tokens, bad_norms = report.tolist()
    loss = loss_sum / max(tokens, 1.0)
    finite_loss, finite_norm = math.isfinite(loss), bad_norms == 0.0
    updated = finite_loss and finite_norm
    if updated:
        clip_and_update(optimizer, grad_norm)
    return StepResult(
        loss=loss,
        num_tokens=int(tokens),
        grad_norm=grad_norm,
        finite_loss=finite_loss,
        finite_grad_norm=finite_norm,
        updated=updated,
    )


def clip_and_update(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    """Scale the prepared gradients to norm `clip_grad` and let AdamW step.

    torch's fused AdamW scales them while it reads them, which saves a pass; it stores them scaled.
    """
    clip = optimizer.config.clip_grad
    inner, parameters = inner_optimizers(optimizer), optimizer.get_parameters()
    fused = all(isinstance(x, torch.optim.AdamW) and x.param_groups[0]["fused"] for x in inner)
    clips = clip > 0.0 and grad_norm + 1e-6 > clip and parameters
    if clips and not fused:
        clip_grad_by_total_norm_fp32(parameters, clip, grad_norm)
    for part in inner if clips and fused else ():
        part.grad_scale = torch.tensor((grad_norm + 1e-6) / clip, device=device.device())
    optimizer.step_with_ready_grads()
    for part in inner if clips and fused else ():
        del part.grad_scale


def attach_finalizer(chunks: list[DistributedDataParallel], parallel: Parallel) -> None:
    """Tell the schedule what ends a step: gradients are reduced and scaled over our groups, and FP8 layers
    with delayed scaling go on to their next scales."""
    scaling = DelayedScaling(chunks, parallel.groups.tp_dp_cp)

    def finalize(*args: object, **options: object) -> None:
        finalize_model_grads(*args, **(options | {"pg_collection": parallel.groups}))
        scaling.update()

    chunks[0].config.finalize_model_grads_func = finalize


def evaluate(
    chunks: list[DistributedDataParallel],
    batches: Iterator[Batch],
    *,
    num_microbatches: int,
    parallel: Parallel,
) -> tuple[float, int]:
    """Mean loss per token (nats) of the full model over the next `num_microbatches` of each
    data-parallel rank, and the number of tokens; the same on every rank."""
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        sums = run_microbatches(
            chunks,
            [next(batches) for _ in range(num_microbatches)],
            parallel=parallel,
            forward_only=True,
        )
    for chunk in chunks:
        chunk.train()
    dist.all_reduce(sums)
    total, tokens = sums.tolist()
    return total / max(tokens, 1.0), int(tokens)
