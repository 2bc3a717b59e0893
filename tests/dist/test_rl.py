"""One RL step is the same under every layout; runs resume; the engine has the trainer's weights."""

from dataclasses import replace

import pytest

from megatron_tlt.rl.dump import read_dump, write_dump
from megatron_tlt.rl.metrics import MismatchError
from tests.dist.rl_tasks import (
    ONE,
    PP2,
    SP2,
    TP2,
    VPP2,
    publish_differently,
    read_metrics,
    run_loop,
    run_until_killed,
    run_until_signalled,
    train_with_stale_engine,
    train_without_encoder,
    write_fixed_dump,
    write_prompts,
)
from tests.dist.workers import run_distributed

LAYOUTS = {"TP2": TP2, "SP2": SP2, "PP2": PP2, "VPP2": VPP2, "DP2": ONE}
# GRPO under all of them; of the others, each under the layout that its own sums could go wrong in.
CHOSEN = {
    "grpo": list(LAYOUTS), "dr_grpo": ["TP2"], "dapo": ["DP2"], "reinforce_plus_plus": ["DP2", "PP2"],
    "gspo": ["PP2"], "rloo": ["DP2", "TP2"],
}  # fmt: skip
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
    for name in CHOSEN[algorithm]:
        metrics, other = replay(tmp_path, name, LAYOUTS[name], 2, algorithm)
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


def loop(tmp_path, name: str, layout: dict, world_size: int, **sections) -> tuple[dict, list]:
    """Two steps with generation: (result, samples of both steps)."""
    root = tmp_path / name
    root.mkdir()
    write_prompts(root / "prompts.jsonl")
    rollout = {
        "rollout_batch_size": 4, "n_samples_per_prompt": 4, "max_response_len": 16,
        "max_running_requests": 8, "check_weight_update": True, "sync_bucket_mib": 1,
    } | sections.pop("RolloutConfig", {})  # fmt: skip
    sections |= {"RolloutConfig": rollout, "save_debug_rollout_data": str(root / "dump")}
    result = run_distributed(run_loop, world_size, root, layout, sections)[0]
    for metrics in read_metrics(root):
        assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    return result, [sample for step in (1, 2) for sample in read_dump(root / "dump", step)]


def test_rollouts_and_updates_are_the_same_on_any_number_of_engines(tmp_path):
    """The engine's tokens are its own seed's, wherever a prompt goes; log-probs are the trainer's."""
    expected, samples = loop(tmp_path, "one", ONE, 1)
    assert len(samples) == 32 and expected["samples"] == 32 and expected["cursor"] == 8
    assert len({s.rollout.prompt_id for s in samples}) == 8
    shared = {"RolloutConfig": {"schedule": "shared", "max_running_requests": 4}}
    released = {"RolloutConfig": shared["RolloutConfig"] | {"offload_rollout": True}}
    ngram = {"speculation": "ngram"}
    for name, layout, sections in (
        ("TP2", TP2, ngram), ("PP2", PP2, {}), ("DP2", ONE, {}), ("DP2 shared", ONE, shared | ngram),
        ("TP2 shared, cache released", TP2, released),
    ):  # fmt: skip
        result, others = loop(tmp_path, name, layout, 2, **sections)
        assert [s.rollout.tokens for s in others] == [s.rollout.tokens for s in samples], name
        assert [s.reward for s in others] == [s.reward for s in samples], name
        assert {v for s in others for v in s.rollout.weight_versions} == {0, 1}
        assert largest_weight_difference(expected["weights"], result["weights"]) <= 1e-5, name
        assert result["cursor"] == 8


RESUMED = {
    "AlgorithmConfig": {"kl_loss_coef": 0.1, "ref_update_interval": 2},
    "RlTrainingConfig": {"train_iters": 4, "max_tokens_per_gpu": 64},
    "speculation": "ngram",
}


def resumable(root) -> dict:
    if not root.exists():
        root.mkdir()
        write_prompts(root / "prompts.jsonl")
    folder = str(root / "checkpoint")
    return RESUMED | {
        "save_debug_rollout_data": str(root / "dump"),
        "CheckpointConfig": {"save": folder, "load": folder, "save_interval": 1},
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("rl") / "whole"
    return run_loop(root, ONE, resumable(root)), root


@pytest.mark.parametrize("phase", ["generate", "reward", "log_probs", "update", "publish", "save"])
def test_killed_in_any_phase_the_same_command_goes_on_identically(uninterrupted, tmp_path, phase):
    whole, whole_root = uninterrupted
    root = tmp_path / "killed"
    # Counters move on before the weights are published.
    iteration = 3 if phase in ("publish", "save") else 2
    run_until_killed(root, ONE, resumable(root), phase=phase, iteration=iteration)
    result = run_loop(root, ONE, resumable(root))
    assert result["iteration"] == 4 and result["cursor"] == whole["cursor"] == 16
    seen = []
    for step in (1, 2, 3, 4):
        ours, theirs = read_dump(root / "dump", step), read_dump(whole_root / "dump", step)
        assert [s.rollout.tokens for s in ours] == [s.rollout.tokens for s in theirs]
        seen += sorted({s.rollout.prompt_id for s in ours})
    assert sorted(seen[:12]) == list(range(12)), "each prompt once in the first epoch"
    assert largest_weight_difference(whole["weights"], result["weights"]) == 0.0


def test_what_rollout_only_writes_train_only_trains_on_as_the_whole_run_does(tmp_path):
    sections = {"RlTrainingConfig": {"train_iters": 1, "max_tokens_per_gpu": 64}}
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
        write_prompts(tmp_path / name / "prompts.jsonl")
    whole = run_loop(tmp_path / "whole", ONE, sections)
    dump = str(tmp_path / "dump")
    generate = {"debug_rollout_only": True, "save_debug_rollout_data": dump}
    untouched = run_loop(tmp_path / "halves", ONE, sections | generate)
    assert largest_weight_difference(whole["weights"], untouched["weights"]) > 1e-4
    replay = {"debug_train_only": True, "load_debug_rollout_data": dump}
    halves = run_loop(tmp_path / "halves", ONE, sections | replay)
    assert largest_weight_difference(whole["weights"], halves["weights"]) == 0.0
    assert read_metrics(tmp_path / "halves")[-1]["perf/rollout_time"] == 0.0


@pytest.mark.parametrize("rollout", [{"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5}])
def test_log_probs_of_engine_and_trainer_agree_at_any_temperature_and_truncation(tmp_path, rollout):
    """Both are those of the full distribution at the temperature: nothing is renormalised after top-p."""
    (tmp_path / "run").mkdir()
    write_prompts(tmp_path / "run" / "prompts.jsonl")
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "max_response_len": 16}
    run_loop(
        tmp_path / "run", ONE,
        {"RolloutConfig": sizes | rollout, "AlgorithmConfig": {"max_logprob_diff": 1e-4}},
    )  # fmt: skip
    for metrics in read_metrics(tmp_path / "run"):
        assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-4


def test_a_stale_engine_ends_the_run_before_the_update(tmp_path):
    (tmp_path / "run").mkdir()
    write_prompts(tmp_path / "run" / "prompts.jsonl")
    sections = {"AlgorithmConfig": {"max_logprob_diff": 1e-3}}
    with pytest.raises(MismatchError, match="stale weights"):
        train_with_stale_engine(tmp_path / "run", sections)


def test_a_replica_without_samples_takes_part_and_changes_nothing(tmp_path):
    """One response on two replicas: the other runs forward and backward over padding, nobody waits."""
    results = []
    for name, world_size in (("one", 1), ("two", 2)):
        root = tmp_path / name
        root.mkdir()
        write_prompts(root / "prompts.jsonl")
        sample = write_fixed_dump(root / "dump")[0]
        write_dump(root / "dump", 1, [sample])
        sections = {
            "RolloutConfig": {"rollout_batch_size": 1, "n_samples_per_prompt": 1},
            "AlgorithmConfig": {
                "algorithm": "reinforce_plus_plus", "normalize_advantages": False, "kl_coef": 0.0,
            },
            "RlTrainingConfig": {"train_iters": 1, "max_tokens_per_gpu": 64},
            "debug_train_only": True,
            "load_debug_rollout_data": str(root / "dump"),
        }  # fmt: skip
        results.append(run_distributed(run_loop, world_size, root, ONE, sections)[0]["weights"])
        assert read_metrics(root)[0]["train/grad_norm"] > 0.01
    assert largest_weight_difference(*results) <= 1e-6


def test_engines_with_different_weights_are_found_by_the_checksum_on_every_rank(tmp_path):
    for message in run_distributed(publish_differently, 2, tmp_path):
        assert "ranks [1]" in message and "version 5" in message


def test_after_the_prompts_are_read_no_text_becomes_tokens(tmp_path):
    """Token-in, token-out: decoding and encoding again may give other ids."""
    (tmp_path / "run").mkdir()
    write_prompts(tmp_path / "run" / "prompts.jsonl")
    train_without_encoder(tmp_path / "run")


@pytest.mark.parametrize("phase,ended", [("generate", 1), ("update", 2)])
def test_asked_to_end_a_run_drops_its_rollout_or_ends_its_step_and_continues(
    uninterrupted, tmp_path, phase, ended
):
    whole, _ = uninterrupted
    root = tmp_path / "stopped"
    sections = resumable(root)
    sections["CheckpointConfig"] = sections["CheckpointConfig"] | {"save_interval": 4}
    assert run_until_signalled(root, sections, iteration=1, phase=phase) == ended
    result = run_loop(root, ONE, resumable(root))
    assert result["iteration"] == 4 and result["cursor"] == whole["cursor"]
    assert largest_weight_difference(whole["weights"], result["weights"]) == 0.0


@pytest.mark.parametrize("world_size,layout", [(1, ONE), (2, PP2)])
def test_reusing_the_forward_pass_changes_nothing(tmp_path, world_size, layout):
    found = []
    for reuse in (True, False):
        found.append(
            replay(
                tmp_path, str(reuse), layout, world_size, "grpo",
                global_batch_size=16, num_epochs=1, reuse_forward=reuse,
            )
        )  # fmt: skip
    (fast, fast_weights), (slow, slow_weights) = found
    for key in SAME:
        assert fast[key] == pytest.approx(slow[key], abs=1e-6), key
    assert largest_weight_difference(fast_weights, slow_weights) <= 1e-6


def test_reward_rises_from_a_random_policy_and_the_same_seed_gives_the_same_run(tmp_path):
    rewards = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_prompts(tmp_path / name / "prompts.jsonl")
        sections = {
            "RolloutConfig": {
                "rollout_batch_size": 8, "n_samples_per_prompt": 8, "max_response_len": 16,
            },
            "RlTrainingConfig": {"train_iters": 16, "max_tokens_per_gpu": 2048},
            "OptimizerConfig": {"lr": 3e-3},
        }  # fmt: skip
        run_loop(tmp_path / name, ONE, sections)
        rewards.append([m["rollout/raw_reward"] for m in read_metrics(tmp_path / name)])
    assert rewards[0] == rewards[1]
    assert sum(rewards[0][-3:]) / 3 > sum(rewards[0][:3]) / 3 + 0.2


@pytest.mark.parametrize("algorithm", ["dr_grpo", "dapo", "gspo", "rloo"])
def test_leaving_out_responses_without_gradient_changes_nothing(tmp_path, algorithm):
    """Two updates; in the second, rewards are equal within every group."""
    bare = {"kl_coef": 0.0, "kl_loss_coef": 0.0, "entropy_coef": 0.0, "truncation": "mask"}
    found = []
    for skip in (True, False):
        root = tmp_path / str(skip)
        root.mkdir()
        write_prompts(root / "prompts.jsonl")
        samples = write_fixed_dump(root / "dump")
        flat = [replace(s, reward=replace(s.reward, score=0.5)) for s in samples[8:]]
        write_dump(root / "dump", 1, [*samples[:8], *flat])
        sections = {
            "debug_train_only": True, "load_debug_rollout_data": str(root / "dump"),
            "AlgorithmConfig": {"algorithm": algorithm} | ALGORITHMS[algorithm] | bare,
            "RlTrainingConfig": {
                "train_iters": 1, "global_batch_size": 8, "max_tokens_per_gpu": 64,
                "skip_zero_advantage": skip,
            },
        }  # fmt: skip
        weights = run_distributed(run_loop, 2, root, ONE, sections)[0]["weights"]
        found.append((read_metrics(root)[0], weights))
    (fast, fast_weights), (slow, slow_weights) = found
    assert fast["perf/zero_advantage_skipped"] >= 8 and slow["perf/zero_advantage_skipped"] == 0
    assert slow["train/grad_norm"] > 0.01
    for key in ("train/loss", "train/pg_loss", "train/grad_norm", "rollout/raw_reward"):
        assert fast[key] == pytest.approx(slow[key], abs=1e-6), key
    assert largest_weight_difference(fast_weights, slow_weights) <= 1e-6
