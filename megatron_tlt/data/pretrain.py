"""From `--data-path` to the train, validation and test datasets of a pretraining run."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_tlt.data.blend import normalize, parse_blend
from megatron_tlt.data.gpt_dataset import BlendedDataset, GPTDataset, SampleDataset, TokenSource
from megatron_tlt.data.gpt_index import DataOrder
from megatron_tlt.data.index_cache import CacheSync, SingleProcess, load_indices
from megatron_tlt.data.indexed import IndexedDataset
from megatron_tlt.data.mock import MockTokens
from megatron_tlt.data.provenance import check_tokenizer
from megatron_tlt.data.split_plan import Cut, SplitPlan, plan_split
from megatron_tlt.data.tokenizer import Tokenizer, require_eod

SPLITS = ("train", "valid", "test")
_MOCK = "mock"
_LOOKS, _TOKENS_PER_LOOK = 16, 4096


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Where the tokens come from and how they are cut (Megatron's names)."""

    data_path: list[str] | None = None
    """Prefixes of .bin/.idx files, or weight prefix weight prefix ...; cut by `split`."""
    train_data_path: list[str] | None = None
    """As data_path, for training only; used whole."""
    valid_data_path: list[str] | None = None
    """As data_path, for validation only; used whole."""
    test_data_path: list[str] | None = None
    """As data_path, for testing only; used whole."""
    split: str = "969,30,1"
    """Shares of documents for training, validation, test."""
    data_cache_path: str | None = None
    """Folder for sample indices; default: `cache` beside the first data file."""
    mock_data: bool = False
    """Use synthetic tokens, without files."""
    num_workers: int = 2
    """Data loader processes per rank; 0 loads in the training process."""
    eod_mask_loss: bool = False
    """Take no loss on predictions made from an end-of-document token."""
    reset_position_ids: bool = False
    """Start positions at 0 after each end-of-document token."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out the last validation tokens that fill no sequence; else they are padded."""
    data_order: DataOrder = "megatron"
    """megatron: its sample order; extendable: a longer run begins with the shorter run's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blend:
    """Files of one split, their weights if any, and the part of each file, as fractions, to use."""

    prefixes: list[str]
    weights: list[float] | None
    bounds: tuple[float, float]


def build_datasets(
    config: DataConfig,
    *,
    tokenizer: Tokenizer,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    sync: CacheSync | None = None,
) -> tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]:
    """Train, validation and test datasets of at least `num_samples` samples each.

    A split is None when no sample of it is asked for, its share of `split` is 0, or only other
    splits have a data path. A collective over the ranks of `sync` (default: a single process).
    Raises ValueError for contradicting or missing paths, damaged files, files of another tokenizer,
    and splits without documents.
    """
    eod = require_eod(tokenizer) if config.eod_mask_loss or config.reset_position_ids else None
    blends = [
        blend if wanted else None
        for blend, wanted in zip(_blends(config), num_samples, strict=True)
    ]
    if num_samples[0] and blends[0] is None:
        raise ValueError(
            "there is no training data: give --train-data-path, or --split a first share"
        )
    sources = {
        prefix: _open(prefix, tokenizer) for blend in blends if blend for prefix in blend.prefixes
    }
    plans = []
    for split, blend, wanted in zip(SPLITS, blends, num_samples, strict=True):
        keep = split == "valid" and not config.drop_last_partial_validation_sequence
        cut = Cut(seq_length=seq_length, seed=seed, order=config.data_order, keep_partial=keep)
        plans.append(blend and _plan(split, blend, sources, num_samples=wanted, cut=cut))
    requests = [request for plan in plans if plan for request in plan.requests()]
    arrays = iter(
        load_indices(requests, cache_path=_cache_path(config), sync=sync or SingleProcess())
    )
    after = (eod if config.eod_mask_loss else None, eod if config.reset_position_ids else None)
    return tuple(plan and _assemble(plan, arrays, after) for plan in plans)


def split_bounds(split: str) -> list[tuple[float, float] | None]:
    """`"969,30,1"` -> `[(0, 0.969), (0.969, 0.999), (0.999, 1)]`; None for a share of 0."""
    try:
        shares = [float(word) for word in split.split(",")]
    except ValueError as error:
        raise ValueError(f"--split {split!r}: want up to three numbers, as 969,30,1") from error
    if len(shares) > len(SPLITS) or min(shares) < 0 or not sum(shares) > 0:
        raise ValueError(f"--split {split!r}: want up to three shares >= 0, not all 0, as 969,30,1")
    ends = [0.0, *itertools.accumulate(normalize(shares + [0.0] * (len(SPLITS) - len(shares))))]
    return [pair if pair[1] > pair[0] else None for pair in itertools.pairwise(ends)]


def _blends(config: DataConfig) -> list[_Blend | None]:
    """The files of each split. Raises ValueError unless they are given in exactly one way."""
    own_paths = [config.train_data_path, config.valid_data_path, config.test_data_path]
    given = {
        "--data-path": config.data_path is not None,
        "--train-data-path/--valid-data-path/--test-data-path": any(own_paths),
        "--mock-data": config.mock_data,
    }
    if sum(given.values()) != 1:
        raise ValueError(
            f"give exactly one of {list(given)}, not {[n for n, on in given.items() if on]}"
        )
    if any(own_paths):
        return [paths and _own_blend(paths) for paths in own_paths]
    prefixes, weights = ([_MOCK], None) if config.mock_data else parse_blend(config.data_path)
    return [
        bounds and _Blend(prefixes=prefixes, weights=weights, bounds=bounds)
        for bounds in split_bounds(config.split)
    ]


def _own_blend(paths: list[str]) -> _Blend:
    prefixes, weights = parse_blend(paths)
    return _Blend(
        prefixes=prefixes, weights=weights if len(prefixes) > 1 else None, bounds=(0.0, 1.0)
    )


def _open(prefix: str, tokenizer: Tokenizer) -> TokenSource:
    if prefix == _MOCK:
        return MockTokens(vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    check_tokenizer(prefix, tokenizer)
    dataset = IndexedDataset(prefix)
    _check_ids(dataset, prefix, tokenizer)
    return dataset


def _check_ids(dataset: IndexedDataset, prefix: str, tokenizer: Tokenizer) -> None:
    """A look at a few places, which finds files of another tokenizer; tools/inspect_data.py reads all."""
    places = np.linspace(0, len(dataset) - 1, min(len(dataset), _LOOKS)).astype(int)
    for place in places.tolist():
        length = min(int(dataset.sequence_lengths[place]), _TOKENS_PER_LOOK)
        ids = dataset.get(place, 0, length)
        if length and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise ValueError(
                f"{prefix} holds ids {ids.min()}..{ids.max()} in sequence {place}, the tokenizer has 0.."
                f"{tokenizer.vocab_size - 1}: preprocess the data with this tokenizer, or give its own"
            )


def _plan(
    split: str, blend: _Blend, sources: dict[str, TokenSource], *, num_samples: int, cut: Cut
) -> SplitPlan:
    ranges = []
    for prefix in blend.prefixes:
        lengths = sources[prefix].sequence_lengths
        first, last = (round(bound * len(lengths)) for bound in blend.bounds)
        num_tokens = int(lengths[first:last].sum(dtype=np.int64))
        if num_tokens < 2:
            raise ValueError(
                f"the {split} split takes sequences {first}..{last} of the {len(lengths)} in "
                f"{prefix}: {num_tokens} tokens, but {num_samples} samples are asked for: give "
                f"--split a larger {split} share, or ask for no such samples"
            )
        ranges.append((sources[prefix], first, last))
    return plan_split(ranges, blend.weights, num_samples=num_samples, cut=cut)


def _cache_path(config: DataConfig) -> Path | None:
    """None keeps indices in memory: mock data, which is to need no files."""
    if config.data_cache_path is not None:
        return Path(config.data_cache_path)
    if config.mock_data:
        return None
    paths = config.data_path or config.train_data_path or config.valid_data_path
    prefixes, _ = parse_blend(paths or config.test_data_path)
    return Path(prefixes[0]).parent / "cache"


def _assemble(
    plan: SplitPlan, arrays: Iterator[dict[str, np.ndarray]], after: tuple[int | None, int | None]
) -> SampleDataset:
    """Take the arrays of `plan.requests()`, in order, from `arrays`."""
    datasets = [
        GPTDataset(
            share.source,
            next(arrays),
            seq_length=share.cut.seq_length,
            order_key=share.order_key(),
            mask_loss_after=after[0],
            reset_positions_after=after[1],
        )
        for share in plan.shares
    ]
    if plan.weights is None:
        return datasets[0]
    return BlendedDataset(datasets, next(arrays), weights=plan.weights)
