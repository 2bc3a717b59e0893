"""The drafter learns in the tail of rollouts: it really trains, replicas agree, nothing else changes."""

import pytest
import torch

from megatron_tlt.rl.dump import read_dump
from tests.dist.rl_tasks import ONE, PP2, TP2, run_loop, run_until_killed, write_prompts
from tests.dist.tlt_tasks import merge_after, run_tlt, run_with_a_late_rank
from tests.dist.workers import run_distributed
from tools.prove_spot import killed_tail, run_tails

DRAFTING = {"speculation": "tlt", "DraftingConfig": {"min_updates": 2}}


def folder(tmp_path, name: str):
    root = tmp_path / name
    root.mkdir()
    write_prompts(root / "prompts.jsonl")
    return root


def test_replicas_merge_to_the_token_weighted_mean_alike_to_the_last_bit():
    """Parameters and moments; `bits` are those after one more step, so the optimizers agree too."""
    results = run_distributed(merge_after, 2, [3, 1], [8, 20])
    assert len({r["bits"] for r in results}) == 1 and {r["iteration"] for r in results} == {5}
    mean = sum(r["tokens"] / 44 * (r["mine"] - r["start"]) for r in results)
    torch.testing.assert_close(results[0]["merged"], results[0]["start"] + mean, atol=1e-6, rtol=1e-5)
    assert torch.equal(results[0]["merged"], results[1]["merged"])
    one_only = run_distributed(merge_after, 2, [2, 0], [8, 20])
    torch.testing.assert_close(one_only[1]["merged"], one_only[0]["mine"], atol=1e-7, rtol=1e-6)
    nobody = run_distributed(merge_after, 2, [0, 0], [8, 20])
    assert torch.equal(nobody[0]["merged"], nobody[0]["start"])


@pytest.mark.parametrize("world_size,layout", [(1, ONE), (2, ONE), (2, TP2), (2, PP2)])
def test_a_run_with_tlt_trains_one_drafter_and_draws_the_same_tokens(tmp_path, world_size, layout):
    plain = folder(tmp_path, "off")
    run_distributed(run_loop, 1, plain, ONE, {"save_debug_rollout_data": str(plain / "dump")})
    root = folder(tmp_path, "tlt")
    sections = DRAFTING | {"save_debug_rollout_data": str(root / "dump")}
    results = run_distributed(run_tlt, world_size, root, layout, sections, timeout=200.0)
    for step in (1, 2):
        ours, theirs = read_dump(root / "dump", step), read_dump(plain / "dump", step)
        assert [s.rollout.tokens for s in ours] == [s.rollout.tokens for s in theirs]
    for name in ("weights", "moments", "iteration", "version", "trigger"):
        assert len({str(r["after"][name]) for r in results}) == 1, f"{name} differs between ranks"
    for result in results:
        assert result["after"]["weights"] != result["before"]["weights"], "nothing was trained"
        assert result["engine"] == result["fc"], "the engine drafts with another drafter"
        assert result["shares"] == (layout is not TP2)
    for metrics in results[0]["metrics"]:
        assert metrics["draft/num_updates"] >= 2 and metrics["draft/num_ranks_trained"] >= 1
        assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-4


def test_the_loss_falls_and_drafts_are_accepted_more_often(tmp_path):
    """A policy that hardly moves and is sure of itself: what is learnt in tails must pay in the engine."""
    root = folder(tmp_path, "learn")
    sections = DRAFTING | {
        "DraftingConfig": {"min_updates": 25, "micro_rows": 256},
        "RlTrainingConfig": {"train_iters": 8, "max_tokens_per_gpu": 64},
        "OptimizerConfig": {"lr": 1e-7},
        "RolloutConfig": {
            "rollout_batch_size": 4, "n_samples_per_prompt": 4, "max_response_len": 16,
            "temperature": 0.02,
        },
    }  # fmt: skip
    metrics = run_tlt(root, ONE, sections)["metrics"]
    assert metrics[-1]["draft/loss_last"] < 0.5 * metrics[0]["draft/loss_first"]
    assert metrics[-1]["draft/sim_accept_length"] > metrics[0]["draft/sim_accept_length"] + 0.2
    first, last = (
        [m["draft/accept_length_trained"] for m in part if "draft/accept_length_trained" in m]
        for part in (metrics[:2], metrics[3:])
    )
    assert last and max(last) > max(first, default=1.0) + 0.3


def test_uneven_starts_fill_the_tail_with_training_and_the_ledger_says_so(tmp_path):
    root = folder(tmp_path, "uneven")
    sections = {"speculation": "tlt", "RlTrainingConfig": {"train_iters": 4, "max_tokens_per_gpu": 64}}
    results = run_distributed(run_tlt, 2, root, ONE, sections, 3)
    metrics = results[0]["metrics"]
    assert sum(m["draft/num_updates"] for m in metrics) > 2
    assert sum(m["ledger/train_drafter"] for m in metrics) > 0
    for m in metrics:
        spent = sum(v for k, v in m.items() if k.startswith("ledger/") and k != "ledger/bubble_frac")
        assert spent >= m["perf/step_time"] - 0.05, "seconds are missing from the ledger"
    assert {r["after"]["weights"] for r in results} == {results[0]["after"]["weights"]}


@pytest.mark.parametrize("layout", [ONE, PP2])
def test_waiting_for_a_late_rank_is_waiting_and_belongs_to_the_rollout(tmp_path, layout):
    root = folder(tmp_path, "late")
    metrics = run_distributed(run_with_a_late_rank, 2, root, layout, 0.5)[0]
    assert len(metrics) == 2
    for m in metrics:
        assert m["perf/rollout_time"] >= 0.5 and m["ledger/wait"] >= 0.2  # a mean over two ranks
        assert m["ledger/bubble_frac"] > 0.2


def test_random_tails_lose_no_response_and_leave_equal_replicas():
    for seed in (0, 1, 2):
        found = run_distributed(run_tails, 2, seed, 4)
        assert [len(tails) for tails in found] == [4, 4]


def test_a_rank_that_dies_in_the_tail_ends_the_others_and_the_tail_can_be_repeated(tmp_path):
    assert killed_tail(tmp_path, 10_003) == ""


def resumable(root, steps: int) -> dict:
    ends = str(root / "checkpoint")
    return DRAFTING | {
        "RlTrainingConfig": {"train_iters": steps, "max_tokens_per_gpu": 64},
        "CheckpointConfig": {"save": ends, "load": ends, "save_interval": 1},
        "save_debug_rollout_data": str(root / "dump"),
    }


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_resumed_run_has_drafter_optimizer_lessons_and_bandit_as_they_were(tmp_path, layout):
    root = folder(tmp_path, "resumed")
    more = {"DraftingConfig": {"min_updates": 2, "layout": layout}}
    checkpoint = resumable(root, 2)["CheckpointConfig"] | {"async_save": layout == "eagle3"}
    more["CheckpointConfig"] = checkpoint
    if layout == "eagle3":
        more["ModelConfig"] = {"preset": "tiny-llama", "num_layers": 8}
    ended = run_distributed(run_tlt, 2, root, ONE, resumable(root, 2) | more)
    goes_on = run_distributed(run_tlt, 2, root, ONE, resumable(root, 3) | more)
    for before, after in zip(ended, goes_on, strict=True):
        assert after["before"].pop("iteration_of_run") == 2
        assert after["before"] == before["after"]
        assert after["after"]["weights"] != before["after"]["weights"]


def test_killed_while_generating_a_run_with_tlt_goes_on_with_the_same_rollouts(tmp_path):
    whole, root = folder(tmp_path, "whole"), folder(tmp_path, "killed")
    run_loop(whole, ONE, resumable(whole, 3))
    run_until_killed(root, ONE, resumable(root, 3), phase="generate", iteration=2)
    run_loop(root, ONE, resumable(root, 3))
    for step in (1, 2, 3):
        ours, theirs = read_dump(root / "dump", step), read_dump(whole / "dump", step)
        assert [s.rollout.tokens for s in ours] == [s.rollout.tokens for s in theirs]
