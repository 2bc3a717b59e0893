"""What one split (train, validation, test) is made of, planned before any array is built.

Weights and sizes follow megatron.core's BlendedMegatronDatasetBuilder, with two ends mended: a
blend without weights goes on after one epoch (in proportion to the files' lengths) where Megatron
runs dry, and a file whose share could exceed what Megatron builds for it gets an epoch more, where
Megatron raises.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.data.blend import build_blend_index, normalize
from megatron_tlt.data.gpt_dataset import TokenSource
from megatron_tlt.data.gpt_index import DataOrder, SamplePlan, build_gpt_index, plan_samples
from megatron_tlt.data.index_cache import IndexRequest

# Megatron's mid_level_dataset_surplus: samples built beyond a blend's share.
_SURPLUS = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a split's stream of tokens becomes ordered samples."""

    seq_length: int
    seed: int
    order: DataOrder
    keep_partial: bool = False
    """Keep (padded) the last tokens that fill no sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileShare:
    """Sequences [first, last) of one token file, and the samples drawn from them."""

    source: TokenSource
    first: int
    last: int
    cut: Cut
    plan: SamplePlan

    def order_key(self) -> dict[str, object]:
        """All that the order of samples depends on; epochs only where they change it."""
        key = {
            "source": self.source.fingerprint,
            "sequences": [self.first, self.last],
            "seq_length": self.cut.seq_length,
            "seed": self.cut.seed,
            "order": self.cut.order,
            "keep_partial": self.cut.keep_partial,
        }
        if self.cut.order == "megatron":
            key["epochs"] = self.plan.num_epochs
            key["separate"] = self.plan.separate_final_epoch
        return key

    def request(self) -> IndexRequest:
        plan = self.plan

        def build() -> dict[str, np.ndarray]:
            documents = np.arange(self.first, self.last, dtype=np.int32)
            lengths = self.source.sequence_lengths
            return build_gpt_index(
                lengths, documents, plan, seed=self.cut.seed, order=self.cut.order
            )

        return IndexRequest(
            key={"kind": "gpt", **self.order_key(), "epochs": plan.num_epochs},
            build=build,
            shapes={
                "document_index": ((self.last - self.first) * plan.num_epochs,),
                "sample_index": (plan.num_samples + 1, 2),
                "shuffle_index": (plan.num_samples,),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPlan:
    """The shares of a split, blended by `weights` into `size` samples; or one share alone."""

    shares: list[FileShare]
    weights: list[float] | None = None
    size: int = 0

    def requests(self) -> list[IndexRequest]:
        """Index arrays needed: one request per share, then the blend's if there is one."""
        requests = [share.request() for share in self.shares]
        if self.weights is not None:
            weights, size = self.weights, self.size
            requests.append(
                IndexRequest(
                    key={"kind": "blend", "weights": weights, "size": size},
                    build=lambda: build_blend_index(weights, size),
                    shapes={"dataset_index": (size,), "dataset_sample_index": (size,)},
                )
            )
        return requests


def plan_split(
    sources: Sequence[tuple[TokenSource, int, int]],
    weights: Sequence[float] | None,
    *,
    num_samples: int,
    cut: Cut,
) -> SplitPlan:
    """Shares of `sources` (source, first, last) that together give `num_samples` or a few more."""
    if weights is not None:
        return _plan_weighted(sources, normalize(weights), num_samples=num_samples, cut=cut)
    if len(sources) == 1:
        return SplitPlan(shares=_shares(sources, [num_samples], cut))
    epoch = _shares(sources, [None] * len(sources), cut)
    lengths = [share.plan.num_samples for share in epoch]
    fractions = normalize(lengths)
    if num_samples > sum(lengths):
        epoch = _shares(sources, _at_most_drawn(fractions, num_samples), cut)
    return SplitPlan(shares=epoch, weights=fractions, size=num_samples)


def _plan_weighted(
    sources: Sequence[tuple[TokenSource, int, int]],
    fractions: list[float],
    *,
    num_samples: int,
    cut: Cut,
) -> SplitPlan:
    targets = [math.ceil(num_samples * fraction) for fraction in fractions]
    built = [math.ceil(target * (1 + _SURPLUS)) for target in targets]
    size, fractions = sum(targets), normalize(fractions)
    shares = _shares(sources, built, cut)
    for place, drawn in enumerate(_at_most_drawn(fractions, size)):
        if drawn > shares[place].plan.num_samples:
            shares[place] = _shares(sources[place : place + 1], [drawn], cut)[0]
    return SplitPlan(shares=shares, weights=fractions, size=size)


def _shares(
    sources: Sequence[tuple[TokenSource, int, int]], wanted: Sequence[int | None], cut: Cut
) -> list[FileShare]:
    """One share per source with at least `wanted` samples (None: exactly one epoch)."""
    shares = []
    for (source, first, last), num_samples in zip(sources, wanted, strict=True):
        plan = plan_samples(
            int(source.sequence_lengths[first:last].sum(dtype=np.int64)),
            num_samples=num_samples,
            seq_length=cut.seq_length,
            keep_partial=cut.keep_partial,
        )
        shares.append(FileShare(source=source, first=first, last=last, cut=cut, plan=plan))
    return shares


def _at_most_drawn(fractions: Sequence[float], size: int) -> list[int]:
    """Upper bound of the draws from each dataset in `build_blend_index`."""
    return [math.floor(fraction * size) + 1 for fraction in fractions]
