"""The sweeps of draft trees: which are legal, and what a row says."""

import argparse

import pytest
import torch

from megatron_tlt.types import OFF, Strategy
from tools.bench.readme_tables import strategies_table
from tools.bench.strategies import eagle, rows_of, sweeps
from tools.bench.targets import add_shape_arguments, add_training_arguments, make_toy, small_target

ARGS = argparse.Namespace(
    depths=[2, 4], verifies=[4, 8], topks=[1, 2], batches=[1, 16], depth=3, topk=2, verify=8
)


def test_a_tree_verifies_more_than_its_depth_and_no_more_nodes_than_it_has():
    assert eagle(3, 1, 4) == Strategy(drafter="eagle", num_steps=3, topk=1, num_draft_tokens=4)
    assert eagle(3, 1, 5) is None  # a chain of 3 and its root are 4
    assert eagle(2, 2, 7) == Strategy(drafter="eagle", num_steps=2, topk=2, num_draft_tokens=7)
    assert eagle(2, 2, 8) is None  # 1 + 2 + 4
    assert eagle(4, 2, 4) is None  # even a chain of that depth is longer


def test_every_sweep_varies_what_its_name_says():
    cells = sweeps(ARGS)
    shapes = {cell: [(s.num_steps, s.topk, s.num_draft_tokens) for s in found]
              for cell, found in cells.items()}  # fmt: skip
    assert shapes == {
        ("depth", 1): [(2, 2, 4), (4, 2, 8)],
        ("topk", 1): [(3, 1, 4), (3, 2, 8)],
        ("batch", 1): [(3, 2, 4), (3, 2, 8)],
        ("batch", 16): [(3, 2, 4), (3, 2, 8)],
    }


def test_speed_is_over_plain_decoding_at_the_same_batch_size():
    cells = {("depth", 1): [eagle(2, 2, 4)], ("topk", 1): [eagle(2, 2, 4)], ("batch", 16): [eagle(2, 2, 4)]}
    tree = eagle(2, 2, 4)
    measured = {
        1: {OFF: _speed(100.0, 1.0), tree: _speed(250.0, 2.5)},
        16: {OFF: _speed(800.0, 1.0), tree: _speed(400.0, 2.5)},
    }
    rows = rows_of(cells, measured)
    assert [(row["sweep"], row["batch"], row["speedup"]) for row in rows] == [
        ("depth", 1, 2.5), ("topk", 1, 2.5), ("batch", 16, 0.5),
    ]  # fmt: skip
    text = "\n".join(strategies_table(rows))
    assert "| 2 | 2.50, 2.50x |" in text and "| 4 | 2.50, 0.50x |" in text


def test_a_kept_target_is_the_same_for_the_next_benchmark(tmp_path):
    parser = argparse.ArgumentParser()
    add_shape_arguments(parser)
    add_training_arguments(parser)
    args = parser.parse_args(["--target", str(tmp_path)])
    make_toy(args)
    args.train_seconds, args.temperature = 0.2, 1.0
    made, found = small_target(args), small_target(args)
    for ours, theirs in ((made.model, found.model), (made.drafter, found.drafter)):
        pairs = list(zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True))
        assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs) and pairs
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "model"]
    args.layers = 3
    with pytest.raises(SystemExit, match="2 layers of width 128"):
        small_target(args)


def _speed(rate: float, accept: float) -> dict:
    return {"tok_s": rate, "spread": 1.0, "accept_length": accept}
