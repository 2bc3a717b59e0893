"""Rewards: the plain ones, the choice among them, and workers that can be killed."""

import os
import re
import threading
import time

import pytest

from megatron_tlt.data.countdown import Problem
from megatron_tlt.data.reward_workers import InlineRewards, RewardWorkers, build_scorer
from megatron_tlt.data.rewards import (
    RewardConfig,
    RewardRequest,
    RewardResult,
    VerifierError,
    check_error_rate,
    choose_reward,
    resolve_reward,
)

OBEY = "tests.unit.reward_functions:obey"


def request(response, label="1", reward=OBEY):
    return RewardRequest(reward=reward, response=response, label=label)


@pytest.fixture(scope="module")
def workers():
    scorer = RewardWorkers(RewardConfig(num_workers=2, timeout_s=1.0, memory_limit_mb=512), [OBEY])
    yield scorer
    scorer.close()


def score(workers, *responses):
    return workers.collect([workers.submit(request(text)) for text in responses])


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("hang", "ran past 1 s and was killed"),
        ("block", "ran past 1 s and was killed"),
        ("crash", r"died \(exit code -11\)"),
        ("exit", r"died \(exit code 3\)"),
        ("hog", "MemoryError"),
        ("raise x", "KeyError: 'x'"),
        ("nan", "returned nan"),
    ],
)
def test_a_reward_that_misbehaves_is_a_verifier_error_and_its_neighbours_are_scored(
    workers, response, reason
):
    bad, right, wrong = score(workers, response, "1", "2")
    assert re.search(reason, bad.error), bad.error
    assert bad.score == bad.verdict == 0.0
    assert right == RewardResult(score=1.0, verdict=1.0)
    assert wrong == RewardResult(score=0.0, verdict=0.0)


def test_a_killed_worker_is_gone_with_all_that_it_started(workers, tmp_path):
    note = tmp_path / "pid"
    [result] = score(workers, f"child {note}")
    assert "killed" in result.error
    pid, deadline = int(note.read_text()), time.monotonic() + 5
    while _is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its worker"
        time.sleep(0.02)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_reward_prints_does_not_become_an_answer(workers):
    [result] = score(workers, "print")
    assert result == RewardResult(score=0.0, verdict=0.0)


def test_submitting_returns_at_once_and_results_come_in_the_order_asked_for(workers):
    start = time.monotonic()
    tickets = [workers.submit(request(text)) for text in ("slow 0.3", "1", "2", "1")]
    assert time.monotonic() - start < 0.2
    results = workers.collect([tickets[3], tickets[0], tickets[2], tickets[1]])
    assert [result.score for result in results] == [1.0, 0.0, 0.0, 1.0]


def test_rewards_work_off_the_main_thread(workers):
    """Where a verifier with SIGALRM limits would raise and score everything 0."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(score(workers, "1")))
    thread.start()
    thread.join(timeout=20)
    assert [result.score for result in found] == [1.0]


def test_many_results_arrive_whole(workers):
    texts = ["2" * (i % 3 + 1) + "x" * (100 * i) for i in range(200)] + ["\ud800 \n é", "1"]
    results = score(workers, *texts)
    assert [result.score for result in results] == [0.0] * 201 + [1.0]
    assert not any(result.error for result in results)


def test_closing_kills_the_workers_even_while_one_hangs():
    scorer = RewardWorkers(RewardConfig(timeout_s=60.0), [OBEY])
    [result] = score(scorer, "pid")
    scorer.submit(request("hang"))
    scorer.close()
    assert not _is_running(int(result.verdict))
    with pytest.raises(RuntimeError, match="gone: closed"):
        scorer.collect([2])
    scorer.close()


@pytest.mark.parametrize(
    ("reward", "complaint"),
    [
        ("nonsense", "none of exact, countdown"),
        ("no_such_module:f", "cannot be imported: No module named 'no_such_module'"),
        ("tests.unit.reward_functions:absent", "no function 'absent'"),
        ("tests.unit.reward_functions:not_callable", "no function 'not_callable'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_before_any_work(reward, complaint):
    with pytest.raises(ValueError, match=complaint):
        resolve_reward(reward)
    with pytest.raises(ValueError, match=complaint):
        RewardWorkers(RewardConfig(), [reward])


def test_inline_rewards_are_the_twin_of_the_workers_and_refuse_what_may_hang():
    problem = Problem(numbers=(3, 5, 7), target=22)
    requests = [
        RewardRequest(reward="countdown", response="!3*5+7", label=problem.label),
        RewardRequest(reward="countdown", response="!3*5-7", label=problem.label),
        RewardRequest(reward="exact", response=" 8 ", label="8"),
        RewardRequest(reward="exact", response="think <answer>8</answer>", label="8"),
    ]
    results = []
    for num_workers in (0, 1):
        config = RewardConfig(
            num_workers=num_workers, format_pattern=".*<answer>.*</answer>", format_coef=0.1
        )
        scorer = build_scorer(config, ["countdown", "exact"])
        assert isinstance(scorer, InlineRewards) == (num_workers == 0)
        results.append(scorer.collect([scorer.submit(item) for item in requests]))
        scorer.close()
    assert results[0] == results[1]
    assert [result.verdict for result in results[0]] == [1.0, 0.0, 1.0, 1.0]
    assert [result.score for result in results[0]] == [1.0, 0.0, 1.0, 1.1]
    with pytest.raises(ValueError, match="num_workers 0"):
        build_scorer(RewardConfig(num_workers=0), ["math"])


def test_the_row_chooses_its_reward_then_its_source_then_the_configuration():
    config = RewardConfig(reward="exact", by_source={"openai/gsm8k": "gsm8k"})
    assert choose_reward(config, own="countdown", data_source="openai/gsm8k") == "countdown"
    assert choose_reward(config, own="", data_source="openai/gsm8k") == "gsm8k"
    assert choose_reward(config, own="", data_source="other") == "exact"


def test_the_run_aborts_when_too_many_verdicts_are_errors():
    check_error_rate(10, 100, max_error_rate=0.1)
    check_error_rate(0, 0, max_error_rate=0.0)
    with pytest.raises(VerifierError, match="11 of 100 .* max_error_rate 0.1; .*: SIGALRM"):
        check_error_rate(11, 100, max_error_rate=0.1, examples=["SIGALRM", "SIGALRM"])


def test_settings_out_of_range_are_refused():
    for wrong in (
        {"timeout_s": 0.0},
        {"num_workers": -1},
        {"max_error_rate": 2.0},
        {"format_coef": 0.1},
        {"format_pattern": "("},
        {"format_pattern": "(", "format_coef": 0.1},
    ):
        with pytest.raises(ValueError):
            RewardConfig(**wrong)


def test_gsm8k_and_math_answers_are_compared_as_mathematics():
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    cases = [
        ("gsm8k", "so it is\n#### 72", "72", 1.0),
        ("gsm8k", "#### 1,234", "1,234", 1.0),
        ("gsm8k", "#### 71", "72", 0.0),
        ("gsm8k", "The answer is 72.", "x\n#### 72", 1.0),
        ("gsm8k", "", "72", 0.0),
        ("math", "\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("math", "so $2\\sqrt{2}$", "\\sqrt{8}", 1.0),
        ("math", "\\boxed{(1,2)}", "(1,2)", 1.0),
        ("math", "\\boxed{x+2}", "x+1", 0.0),
        ("math", '__import__("os").getpid()', "1", 0.0),
    ]
    scorer = build_scorer(RewardConfig(timeout_s=30.0), ["gsm8k", "math"])
    results = scorer.collect(
        [scorer.submit(request(text, label, reward)) for reward, text, label, _ in cases]
    )
    [error] = scorer.collect([scorer.submit(request("\\boxed{1}", "", "math"))])
    scorer.close()
    assert [(result.verdict, result.error) for result in results] == [
        (expected, "") for *_, expected in cases
    ]
    assert "no answer" in error.error


def test_math_that_takes_for_ever_is_killed():
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    scorer = build_scorer(RewardConfig(timeout_s=5.0, memory_limit_mb=1024), ["math"])
    bomb, right = scorer.collect(
        [scorer.submit(request(text, "2", "math")) for text in ("$9^{9^{9^9}}$", "$2$")]
    )
    scorer.close()
    assert bomb.verdict == 0.0
    assert right == RewardResult(score=1.0, verdict=1.0)


def test_the_environment_of_the_run_is_not_changed_by_workers():
    before = dict(os.environ)
    RewardWorkers(RewardConfig(), ["exact"]).close()
    assert dict(os.environ) == before
