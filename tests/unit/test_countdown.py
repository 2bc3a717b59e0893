"""Countdown: problems, search traces with a long tail, and a verifier that no text can fool."""

import random

import pytest

from megatron_tlt.data.countdown import (
    ALPHABET,
    CountdownConfig,
    Problem,
    countdown_reward,
    draw_problem,
    is_solution,
    moves,
    write_trace,
)
from megatron_tlt.data.rewards import REWARDS, resolve_reward

PROBLEM = Problem(numbers=(3, 5, 7), target=22)


def reward(text, problem=PROBLEM):
    return countdown_reward("", text, problem.label, {})


def traces(count, *, seed=0, **settings):
    config, rng = CountdownConfig(**settings), random.Random(seed)
    while count:
        problem = draw_problem(rng, config)
        trace = write_trace(problem, rng, config)
        if trace is not None:
            count -= 1
            yield problem, trace


def test_every_trace_solves_its_problem_in_the_alphabet():
    for problem, trace in traces(300):
        assert reward(trace, problem) == 1.0
        assert set(problem.prompt + trace) <= set(ALPHABET)
        assert len(trace) <= 1000


def test_every_line_of_a_trace_is_right_arithmetic_and_keeps_the_books():
    problem, trace = next(traces(1, seed=4, shares={4: 1.0}, max_trace_chars=5000))
    states = {len(problem.numbers): problem.numbers}
    for line in trace.split("\n"):
        step, _, rest = line.partition("!")[0].partition("|")
        left = tuple(map(int, rest.split())) if rest else (int(step.split("=")[1]),)
        assert any(
            move.text == step and move.left == left
            for move in moves(states[len(left) + 1], max_value=99)
        )
        states[len(left)] = left


def test_response_lengths_are_long_tailed():
    lengths = sorted(len(trace) for _, trace in traces(1000))
    assert lengths[-1] > 8 * lengths[500]
    unlimited = sorted(len(trace) for _, trace in traces(1000, max_trace_chars=10**9))
    assert unlimited[-1] > 10 * unlimited[500]


def test_the_same_seed_gives_the_same_problems_and_traces():
    assert list(traces(20, seed=7)) == list(traces(20, seed=7))
    assert list(traces(20, seed=7)) != list(traces(20, seed=8))


def test_moves_are_all_legal_pairs_once():
    # 2,2: 4 (2+2, 2*2, one each), 2/2=1; no 2-2=0
    assert [move.text for move in moves((2, 2), max_value=99)] == ["2+2=4", "2*2=4", "2/2=1"]
    assert [move.text for move in moves((1, 7), max_value=7)] == ["7-1=6"]
    assert moves((3, 5, 7), max_value=99)[0].left == (7, 8)


@pytest.mark.parametrize(
    "answer",
    ["3*5=15,15+7=22", "3*5=15,7+15=22", "3*5+7", "(3*5)+7=22", "7+5*3", "7 + (5*3)", "3*5+7=22"],
)
def test_right_answers_are_right(answer):
    assert is_solution(answer, (3, 5, 7), 22)
    assert reward(f"3+5=8|7 8\n8+7=15!{answer}") == 1.0
    assert reward(f"so <answer> {answer} </answer>") == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "22",  # numbers not used
        "22=22",
        "3*5=15",  # 7 left over
        "3*5=15,15+7=22,22*1=22",  # 1 was never there
        "3*5=15,15+7=22,15+7=22",  # 15 used twice
        "3*5=16,16+7=23",  # wrong arithmetic
        "3*5=15,15+7=22,7-7=0",
        "7+7+5+3",  # 7 twice
        "3*5+7=23",
        "7*3+1",
        "3*5=15,15+7=22,",  # not finished
        "--22",
        "3*5+7//1",
        "3**5",
        "35-7-6",  # 3 and 5 glued together
        "03*5+7",
        "3*5+7=",
        "1/0",
        "((((((((((3*5+7",
        "3*5+7)",
        "3*5=15=15,15+7=22",
    ],
)
def test_wrong_answers_are_wrong(answer):
    assert not is_solution(answer, (3, 5, 7), 22)
    assert reward(f"!{answer}") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        '__import__("os").getpid()',
        "9**9**9**9",
        "(" * 10**5,
        "9" * 10**6,
        "1+" * 10**5 + "1",
        "[3*5+7]",
        "3*5+7 if 1 else 0",
        "\x00",
        "٣*5+7",  # Arabic-Indic digit
        "3*5+7\n\n",
        "3*5+7",  # no mark
        "!3*5=15,15+7=22\nx",  # the answer is not last
        "<answer>\n3*5+7",  # not closed
        "</answer>3*5+7<answer>",
        "<answer>3*5+7</answer> no <answer>7</answer>",  # the last one counts
        "<answer>" * 10**5 + "\n3*5+7",
    ],
)
def test_hostile_and_malformed_text_is_wrong_at_once(text):
    assert reward(text) == 0.0


def test_numbers_given_twice_must_be_used_twice():
    assert is_solution("2+2=4,4*2=8", (2, 2, 2), 8)
    assert not is_solution("2*4=8", (2, 2, 2), 8)
    assert not is_solution("2+2=4,4+4=8", (2, 2, 2), 8)


def test_division_is_exact_arithmetic():
    assert is_solution("8/(3-8/3)", (3, 3, 8, 8), 24)
    assert not is_solution("7/2=3,3+1=4", (7, 2, 1), 4)


def test_a_label_without_the_facts_is_a_verifier_error_not_a_wrong_answer():
    for label in ("", "22", '{"target": 22}'):
        with pytest.raises(ValueError):
            countdown_reward("", "!3*5+7", label, {})


def test_the_reward_is_registered():
    assert resolve_reward("countdown") is countdown_reward
    assert all(":" in path for path in REWARDS.values())


def test_settings_out_of_range_are_refused():
    for wrong in ({"shares": {}}, {"shares": {1: 1.0}}, {"max_number": 200}, {"max_trace_chars": 1}):
        with pytest.raises(ValueError):
            CountdownConfig(**wrong)
