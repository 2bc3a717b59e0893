"""Drafter, its optimizer and its lessons as files of a checkpoint folder, and back.

`drafter.safetensors` is written by rank 0, for all ranks hold the same; `draft_lessons_00000.safetensors` by
each rank. The target's tables are never among them.
"""

from pathlib import Path

from megatron_tlt.draft.buffer import DraftBuffer
from megatron_tlt.draft.trainer import DrafterTrainer

import torch
from safetensors.torch import load_file

DRAFTER_FILE = "drafter.safetensors"
_MODEL, _MOMENT, _GENERATOR = "model.", "moment.", "generator"


def lessons_file(rank: int) -> str:
    """The file of one rank's buffer."""
    return f"draft_lessons_{rank:05d}.safetensors"


def files_to_save(
    trainer: DrafterTrainer, buffer: DraftBuffer, *, rank: int
) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's files as copies, so that training may go on while they are written."""
    files = {lessons_file(rank): buffer.state()}
    if rank == 0:
        model = trainer.model.state_dict()
        moments = trainer.tensors()[len(list(trainer.model.parameters())) :]
        files[DRAFTER_FILE] = (
            {_MODEL + name: tensor for name, tensor in model.items()}
            | {f"{_MOMENT}{number}": tensor for number, tensor in enumerate(moments)}
            | {_GENERATOR: trainer.generator.get_state()}
        )
    return {
        file: {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}
        for file, found in files.items()
    }


def load_trainer(trainer: DrafterTrainer, folder: Path, *, iteration: int) -> None:
    """Fill drafter and optimizer. Raises ValueError where the checkpoint has another drafter, or none."""
    path = folder / DRAFTER_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {DRAFTER_FILE}: it was saved without a drafter")
    found = load_file(path)
    moments = trainer.tensors()[len(list(trainer.model.parameters())) :]
    wanted = {_MODEL + name: tensor for name, tensor in trainer.model.state_dict().items()}
    wanted |= {f"{_MOMENT}{number}": tensor for number, tensor in enumerate(moments)}
    wrong = sorted(
        name for name, t in wanted.items() if name not in found or found[name].shape != t.shape
    )
    if wrong:
        raise ValueError(f"{path} holds another drafter: {len(wrong)} tensors differ, such as {wrong[0]}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])
    trainer.generator.set_state(found[_GENERATOR])
    trainer.set_iteration(iteration)


def load_lessons(
    buffer: DraftBuffer, folder: Path, *, digests: list[str], rank: int, world_size: int
) -> None:
    """This rank's share of all saved buffers. Raises ValueError for lessons that are not those saved."""
    for saved in range(rank, len(digests), world_size):
        path, part = folder / lessons_file(saved), DraftBuffer(buffer.max_rows, seed=0)
        part.load_state(load_file(path))
        if part.digest() != digests[saved]:
            raise ValueError(f"{path} has digest {part.digest()}, the checkpoint says {digests[saved]}")
        buffer.absorb(part)
