"""One drafter out of the replicas that ranks trained apart: the token-weighted mean of what each has changed.

After a step without communication replica i has moved by d_i on w_i tokens; all of them become the common
start plus sum(w_i d_i) / sum(w_i) (local SGD, https://arxiv.org/abs/1805.09767). Adam's moments are averaged
alike, so that all ranks hold the same optimizer too and any of them can save it. A rank that trained nothing
has weight 0. TLT's release never averages: one engine's drafter improves and the others stay behind.
"""

from megatron_tlt.draft.trainer import DrafterTrainer

import torch
import torch.distributed as dist


def snapshot(trainer: DrafterTrainer) -> torch.Tensor:
    """Parameters and moments as one vector, float32."""
    return torch.cat([tensor.detach().flatten().float() for tensor in trainer.tensors()])


@torch.no_grad()
def merge_replicas(
    trainer: DrafterTrainer, start: torch.Tensor, *, tokens: int, start_iteration: int,
    group: dist.ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Replace the trainer's state by the merged one; collective over `group` (default: the world).

    `start` is the `snapshot` at `start_iteration` that all ranks began from; `tokens` this rank trained on.
    Iterations add up. The result is the same on every rank to the last bit, because each rank adds the same
    reduced sums to the same start. Nothing changes where no rank has trained.
    """
    updates = trainer.iteration - start_iteration
    sums = torch.cat(((snapshot(trainer) - start) * tokens, start.new_tensor([tokens, updates])))
    dist.all_reduce(sums, group=group)
    total, updates = float(sums[-2]), round(float(sums[-1]))
    if not total:
        return
    merged, first = start + sums[:-2] / total, 0
    for tensor in trainer.tensors():
        count = tensor.numel()
        tensor.copy_(merged[first : first + count].view_as(tensor))
        first += count
    trainer.set_iteration(start_iteration + updates)
