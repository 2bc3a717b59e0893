"""Three RL steps on two ranks with real SGLang engines and a drafter in training; one dies in mid-rollout."""

from tests.dist.rl_tasks import write_prompts
from tests.dist.workers import close_pools, run_distributed
from tests.sglang.rl_tasks import STEPS, train_and_compare, train_on_one_engine


def test_engines_hold_the_trainers_weights_after_each_step_and_a_lost_one_costs_nothing(
    tmp_path, record_property
):
    write_prompts(tmp_path / "prompts.jsonl")
    try:
        results = run_distributed(train_and_compare, 2, tmp_path, 2, timeout=500)
    finally:
        close_pools()
    for result in results:
        assert result["iteration"] == STEPS
        assert len(result["checksums"]) == STEPS + 1  # before the first step, too
        assert all(ours == theirs for ours, theirs in result["checksums"])
        assert len({ours for ours, _ in result["checksums"]}) == STEPS + 1
    assert results[0]["checksums"] == results[1]["checksums"]
    assert [r["restarts"] for r in results] == [1, 0]
    assert results[0]["draft_version"] == results[1]["draft_version"] == STEPS
    metrics = results[0]["metrics"]
    (probe,) = results[0]["probes"]
    assert probe["max_log_prob_diff"] < 1e-3 and probe["accept_length"] >= 1
    assert len(metrics) == STEPS and all(m["draft/num_updates"] >= 2 for m in metrics)
    record_property("rl_steps", STEPS)


def test_two_ranks_that_cut_the_model_share_one_engine_over_two_processes(tmp_path):
    write_prompts(tmp_path / "prompts.jsonl")
    try:
        results = run_distributed(train_on_one_engine, 2, tmp_path, timeout=500)
    finally:
        close_pools()
    assert [r["iteration"] for r in results] == [2, 2]
    assert [r["has_engine"] for r in results] == [True, False]
    assert all(all(r["tables"]) for r in results)
    assert results[0]["drafter"] == results[1]["drafter"]
    assert all(m["draft/num_updates"] >= 1 for m in results[0]["metrics"])
    (probe,) = results[0]["probes"]
    assert probe["max_log_prob_diff"] < 1e-3
    assert all(m["train/train_rollout_logprob_abs_diff_max"] < 1e-3 for m in results[0]["metrics"])
