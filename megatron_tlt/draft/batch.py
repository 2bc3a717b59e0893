"""What the drafter's trainer is fed: captured responses as tensors, packed or one a line.

Legend: b lines, s rows of a line, f features of a row, h hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from megatron_tlt.models.drafter_layers import Rows
from megatron_tlt.types import FeatureSample


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBatch:
    """Row i of a sequence: `tokens[i]` was drawn from state i; row i + 1 is its lesson."""

    tokens: torch.Tensor
    """`[b, s]`"""
    features: torch.Tensor
    """`[b, s, f]`"""
    last_hidden: torch.Tensor
    """`[b, s, h]`, final states (the same tensor as `features` for EAGLE-1/2)."""
    mask: torch.Tensor
    """bool `[b, s]`, rows that are no padding."""
    segments: torch.Tensor | None = None
    """`[b, s]`, number of each row's sequence where they are packed; None: one sequence a line."""
    weights: torch.Tensor | None = None
    """`[b, s]`, how much each row counts; None: all alike."""

    @property
    def num_rows(self) -> int:
        return int(self.mask.sum())

    @property
    def positions(self) -> torch.Tensor:
        """Place of each row in its own sequence, `[b, s]` (or `[1, s]`, alike on every line)."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand(1, -1)
        if self.segments is None:
            return places
        begins = torch.ones_like(self.segments, dtype=torch.bool)
        begins[:, 1:] = self.segments[:, 1:] != self.segments[:, :-1]
        return places - torch.where(begins, places, 0).cummax(1).values

    @property
    def rows(self) -> Rows:
        return Rows(self.positions, self.segments)

    def lessons(self) -> torch.Tensor:
        """bool `[b, s - 1]`: rows whose next row belongs to the same sequence."""
        following = self.mask[:, 1:]
        if self.segments is None:
            return following
        return following & (self.segments[:, 1:] == self.segments[:, :-1])

    def to(self, device: torch.device) -> "DraftBatch":
        """The same on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if value is not None}
        return replace(self, **moved)


def collate(samples: Sequence[FeatureSample], *, max_rows: int | None = None) -> DraftBatch:
    """One sequence a line, right-padded: prompt context (where captured) and response of each sample, the
    last `max_rows` rows of them."""
    _check(samples)
    rows = [_rows(sample, max_rows) for sample in samples]
    longest = max(len(tokens) for tokens, _, _ in rows)

    def pad(tensors: list[torch.Tensor]) -> torch.Tensor:
        out = tensors[0].new_zeros(len(tensors), longest, *tensors[0].shape[1:])
        for line, tensor in zip(out, tensors, strict=True):
            line[: len(tensor)] = tensor
        return out

    tokens, features, last = zip(*rows, strict=True)
    lengths = torch.tensor([len(t) for t in tokens])
    padded = pad(list(features))
    return DraftBatch(
        tokens=pad(list(tokens)),
        features=padded,
        last_hidden=padded if samples[0].last_hidden is None else pad(list(last)),
        mask=torch.arange(longest) < lengths[:, None],
    )


def pack(samples: Sequence[FeatureSample], *, multiple_of: int = 1) -> DraftBatch:
    """All sequences in one line without a gap, each seeing itself alone; the line is padded to a multiple.

    The loss is that of `collate` with no padding to compute; a fixed `multiple_of` keeps shapes few.
    """
    _check(samples)
    tokens, features, last = (list(column) for column in zip(*map(_rows, samples), strict=True))
    lengths = [len(t) for t in tokens]
    extra = -sum(lengths) % multiple_of

    def line(tensors: list[torch.Tensor]) -> torch.Tensor:
        padding = tensors[0].new_zeros(extra, *tensors[0].shape[1:])
        return torch.cat([*tensors, padding])[None]

    packed, count = line(features), sum(lengths)
    numbers = torch.arange(len(samples) + 1)
    return DraftBatch(
        tokens=line(tokens),
        features=packed,
        last_hidden=packed if samples[0].last_hidden is None else line(last),
        mask=(torch.arange(count + extra) < count)[None],
        segments=numbers.repeat_interleave(torch.tensor([*lengths, extra]))[None],
    )


def _check(samples: Sequence[FeatureSample]) -> None:
    if not samples:
        raise ValueError("no feature samples to make a batch of: capture features first")


def _rows(
    sample: FeatureSample, max_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.tensor(sample.context_tokens + sample.tokens)
    last = sample.hidden if sample.last_hidden is None else sample.last_hidden
    keep = slice(-max_rows, None) if max_rows else slice(None)
    return tokens[keep], sample.hidden[keep], last[keep]
