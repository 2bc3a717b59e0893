"""Blends: several token files drawn in given proportions, in Megatron's order."""

from collections.abc import Sequence

import numpy as np


def parse_blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Megatron's `--data-path`: prefixes, or weight prefix weight prefix ...

    `["30", "a", "70", "b"]` -> `(["a", "b"], [30.0, 70.0])`; `["a", "b"]` -> `(["a", "b"], None)`.
    Raises ValueError for weights at some places only, or not above 0.
    """
    weights = [_number(word) for word in data_path[::2]]
    if len(data_path) % 2 or not data_path or all(weight is None for weight in weights):
        stray = [word for word in data_path if _number(word) is not None]
        if stray or not data_path:
            raise ValueError(
                f"--data-path {' '.join(data_path)}: want prefixes only, or weight prefix pairs; "
                f"{len(data_path)} words, numbers among them: {stray}"
            )
        return list(data_path), None
    if any(weight is None or not weight > 0 for weight in weights):
        raise ValueError(
            f"--data-path {' '.join(data_path)}: every other word must be a weight above 0, "
            f"got {list(data_path[::2])}"
        )
    return list(data_path[1::2]), weights


def normalize(weights: Sequence[float]) -> list[float]:
    """`weights` scaled to sum 1, by the same float64 operations as Megatron's."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def build_blend_index(weights: Sequence[float], size: int) -> dict[str, np.ndarray]:
    """Which dataset gives sample i, and its how-manieth it is.

    At each step the dataset furthest behind its share is drawn: argmax_d(weights[d] * max(i, 1) -
    drawn[d]), the first on a tie; equal to Megatron's build_blending_indices. Returns
    `dataset_index` int16 [size] and `dataset_sample_index` int64 [size].

    The recurrence is sequential. Here blocks of steps run side by side, each from a guess of how
    many were drawn before it; a block whose guess differs from where the block before it ended is
    run again until all agree, so the result is exact. Two runs that draw differently come closer,
    never further apart, so one repeat mostly suffices.
    """
    shares = np.asarray(weights, dtype=np.float64)
    block = max(1, int(np.sqrt(size)))
    firsts = np.arange(0, size, block)
    drawn = _guess_counts(shares, firsts)
    choices = np.empty((len(firsts), block), np.int16)
    pending = np.arange(len(firsts))
    ends = np.empty_like(drawn)
    while len(pending):
        ends[pending] = _run_blocks(shares, firsts[pending], drawn[pending], choices, pending)
        wrong = np.flatnonzero((drawn[1:] != ends[:-1]).any(axis=1)) + 1
        drawn[wrong] = ends[wrong - 1]
        pending = wrong
    dataset_index = choices.reshape(-1)[:size].copy()
    return {"dataset_index": dataset_index, "dataset_sample_index": _occurrence(dataset_index)}


def _guess_counts(shares: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Draws of each dataset before each of `steps`, int64 [steps, datasets]."""
    exact = shares * steps[:, None]
    counts = np.floor(exact).astype(np.int64)
    missing = steps - counts.sum(axis=1)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return counts + (rank < missing[:, None])


def _run_blocks(
    shares: np.ndarray,
    firsts: np.ndarray,
    drawn: np.ndarray,
    choices: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    """Run the blocks in lockstep; write `choices[rows]`, return the draws after each block."""
    counts = drawn.astype(np.float64)
    each = np.arange(len(firsts))
    for offset in range(choices.shape[1]):
        steps = np.maximum(firsts + offset, 1).astype(np.float64)
        choice = np.argmax(shares * steps[:, None] - counts, axis=1)
        counts[each, choice] += 1
        choices[rows, offset] = choice
    return counts.astype(np.int64)


def _occurrence(labels: np.ndarray) -> np.ndarray:
    """How often labels[i] occurs before i, int64 [n]."""
    by_label = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    result = np.empty(len(labels), np.int64)
    result[by_label] = np.arange(len(labels)) - firsts
    return result


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
