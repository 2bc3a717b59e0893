"""The suffix index against a direct search."""

import random

import pytest

from megatron_tlt.rollout.ngram import NgramIndex, NgramStore


def _search(sequences, context, sizes):
    """Token after the newest occurrence of the longest suffix, by looking at everything."""
    for n in sizes:
        suffix = context[-n:]
        if len(suffix) < n:
            continue
        for sequence in reversed(sequences):
            for end in range(len(sequence) - 1, n - 1, -1):
                if sequence[end - n : end] == suffix:
                    return sequence[end]
    return None


def test_first_proposal_equals_a_direct_search():
    rng, index, sequences = random.Random(0), NgramIndex(min_n=2, max_n=4), []
    for _ in range(20):
        sequence = [rng.randrange(4) for _ in range(30)]
        for cut in range(2, 30):
            index.extend(sequence[:cut], start=cut - 1 if cut > 2 else 0)
        index.extend(sequence, start=29)
        sequences.append(sequence)
        context = [rng.randrange(4) for _ in range(6)]
        found = index.propose(context, count=1)
        assert (found[0] if found else None) == _search(sequences, context, (4, 3, 2))


def test_a_loop_is_continued_for_as_long_as_asked():
    index = NgramIndex()
    sequence = [1, 2, 3, 1, 2, 3, 1, 2]
    index.extend(sequence, start=0)
    assert index.propose(sequence, count=7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_sibling_teaches_and_nothing_known_gives_nothing():
    index = NgramIndex()
    index.extend([9, 8, 7, 6, 5], start=0)
    assert index.propose([1, 9, 8], count=3) == [7, 6, 5]
    assert index.propose([1, 2], count=3) == []
    with pytest.raises(ValueError, match="min_n=3"):
        NgramIndex(min_n=3, max_n=2)


def test_memory_stays_within_its_bound_and_the_newest_is_known():
    rng, index = random.Random(1), NgramIndex(max_entries=100)
    for _ in range(50):
        sequence = [rng.randrange(1000) for _ in range(40)]
        index.extend(sequence, start=0)
        assert len(index) <= 100
    assert index.propose(sequence[:-3], count=3) == sequence[-3:]


def test_the_prompts_not_used_for_longest_are_dropped():
    store = NgramStore(max_entries=300)
    for prompt in range(10):
        store.index(prompt).extend(list(range(100 * prompt, 100 * prompt + 25)), start=0)
        store.index(0)
        store.trim()
        assert len(store) <= 300
    assert 0 in store.indexes and 1 not in store.indexes and 9 in store.indexes
    assert store.index(9).propose([905, 906], count=2) == [907, 908]
