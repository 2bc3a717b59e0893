"""One RL step is the same under every layout; runs resume; the engine has the trainer's weights."""

import pytest

from tests.dist.rl_tasks import (
    ONE,
    PP2,
    SP2,
    TP2,
    VPP2,
    read_metrics,
    run_loop,
    write_fixed_dump,
    write_prompts,
)
from tests.dist.workers import run_distributed

LAYOUTS = {"TP2": TP2, "SP2": SP2, "PP2": PP2, "VPP2": VPP2, "DP2": ONE}
ALGORITHMS = {
    "grpo": {"kl_loss_coef": 0.1},
    "dr_grpo": {},
    "dapo": {"overlong_buffer_len": 8},
    "reinforce_plus_plus": {"kl_coef": 0.05},
    "gspo": {"entropy_coef": 0.01, "eps_clip": 1e-3, "eps_clip_high": 1e-3},
    "rloo": {"kl_coef": 0.05, "use_tis": True, "truncation": "mask"},
}


def largest_weight_difference(ours: dict, theirs: dict) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max()) for n in ours)


def replay(tmp_path, name: str, layout: dict, world_size: int, algorithm: str, **training):
    """One step of 2 epochs x 2 updates from the fixed dump: (metrics, weights)."""
    root = tmp_path / name
    root.mkdir()
    write_prompts(root / "prompts.jsonl")
    write_fixed_dump(root / "dump")
    sections = {
        "debug_train_only": True,
        "load_debug_rollout_data": str(root / "dump"),
        "AlgorithmConfig": {"algorithm": algorithm} | ALGORITHMS[algorithm],
        "RlTrainingConfig": {
            "train_iters": 1, "global_batch_size": 8, "num_epochs": 2, "max_tokens_per_gpu": 64,
        } | training,
    }  # fmt: skip
    result = run_distributed(run_loop, world_size, root, layout, sections)[0]
    return read_metrics(root)[0], result["weights"]


SAME = (
    "train/loss", "train/pg_loss", "train/grad_norm", "train/entropy", "train/pg_clipfrac",
    "rollout/log_probs", "train/train_rollout_logprob_abs_diff", "rollout/raw_reward",
)  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_step_from_a_dump_is_the_same_under_every_layout(tmp_path, algorithm):
    expected, weights = replay(tmp_path, "one", ONE, 1, algorithm)
    assert expected["train/grad_norm"] > 0.01
    layouts = LAYOUTS if algorithm == "grpo" else {k: LAYOUTS[k] for k in ("TP2", "PP2", "DP2")}
    for name, layout in layouts.items():
        metrics, other = replay(tmp_path, name, layout, 2, algorithm)
        for key in SAME:
            assert metrics[key] == pytest.approx(expected[key], abs=1e-5), (name, key)
        assert largest_weight_difference(weights, other) <= 1e-5, name


def test_one_step_does_not_depend_on_how_sequences_are_packed(tmp_path):
    expected, weights = replay(tmp_path, "wide", ONE, 1, "grpo", max_tokens_per_gpu=500)
    assert expected["perf/num_micro_batches"] == 1
    metrics, other = replay(tmp_path, "narrow", ONE, 1, "grpo", max_tokens_per_gpu=33)
    assert metrics["perf/num_micro_batches"] == 3
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    assert largest_weight_difference(weights, other) <= 1e-5
