"""Task data sets: rows that the rewards accept, held-out problems, the number tokenizer."""

import ast
import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from megatron_tlt.data.countdown import CountdownConfig, countdown_reward
from megatron_tlt.data.prompts import PromptDataConfig, load_prompts
from megatron_tlt.data.reasoning import UNSAFE, reasoning_reward
from megatron_tlt.data.tasks import (
    countdown_rows,
    countdown_walks,
    gsm8k_rows,
    reasoning_rows,
    write_number_tokenizer,
    write_rows,
)
from megatron_tlt.data.tokenizer import TokenizerConfig, build_tokenizer


def rows(count, *, held_out=False, seed=0):
    return list(islice(countdown_rows(CountdownConfig(), seed=seed, held_out=held_out), count))


def problem_key(row):
    facts = json.loads(row["label"])
    return (*sorted(facts["numbers"]), facts["target"])


def test_countdown_rows_are_solved_by_their_own_responses():
    for row in rows(50):
        assert countdown_reward("", row["response"], row["label"], {}) == 1.0
    assert Counter(row["data_source"] for row in rows(200)).keys() == {
        f"countdown{n}" for n in (2, 3, 4)
    }


def test_no_problem_is_in_both_splits_in_any_order_of_its_numbers():
    train = {problem_key(row) for row in rows(1000)}
    evaluation = {problem_key(row) for row in rows(300, held_out=True, seed=1)}
    assert len(evaluation) > 100
    assert not train & evaluation


def test_walks_are_right_arithmetic_without_targets():
    for row in islice(countdown_walks(CountdownConfig(), seed=0), 20):
        for line in row["text"].split("\n"):
            left, equals, right = line.split("|")[0].partition("=")
            if equals:
                sign = next(s for s in "+-*/" if s in left)
                a, b = map(int, left.split(sign))
                results = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}
                assert results[sign] == int(right)
        assert "!" not in row["text"] and "?" not in row["text"]


def test_rows_are_written_as_jsonl_that_prompts_are_read_from(tmp_path):
    path = tmp_path / "data" / "train.jsonl"
    written = countdown_rows(CountdownConfig(), seed=0, held_out=False)
    assert write_rows(path, written, size=5) == 5
    tokenizer = build_tokenizer(TokenizerConfig())
    records = load_prompts(PromptDataConfig(prompt_data=[str(path)]), tokenizer).records
    assert [record.text for record in records] == [row["prompt"] for row in rows(5)]
    assert {record.reward for record in records} == {"countdown"}


def test_the_number_tokenizer_has_a_token_a_number_and_gives_text_back(tmp_path):
    path = tmp_path / "tokenizer.json"
    size = write_number_tokenizer(path, max_value=99)
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    )
    assert tokenizer.vocab_size == size == 100 + 11 + 2
    assert tokenizer.eod == tokenizer.eos == 0
    for row in rows(50):
        for text in (row["prompt"], row["response"]):
            assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize("13*5=65|7 65\n")) == 10


def test_gsm8k_rows_carry_the_final_number(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    answer = "He has 600+634=<<600+634=1234>>1234 apples.\n#### 1,234"
    write_rows(path, [{"question": "How many?", "answer": answer}])
    [row] = gsm8k_rows(path)
    assert (row["prompt"], row["label"], row["reward"]) == ("How many?\n", "1234", "gsm8k")
    assert "<<" not in row["response"] and row["response"].endswith("#### 1,234")
    write_rows(path, [{"question": "How many?", "answer": "none"}])
    with pytest.raises(ValueError, match="gsm8k.jsonl:1"):
        list(gsm8k_rows(path))


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "base_conversion", "spell_backward"])
def test_reasoning_gym_answers_score_all_or_nothing(name):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    for row in reasoning_rows(name, size=5, seed=3):
        metadata = json.loads(json.dumps(row["metadata"]))

        def score(text, metadata=metadata, label=row["label"]):
            return reasoning_reward("", text, label, metadata)

        assert score(row["response"]) == score(f" {row['response']}\n") == 1.0
        assert score(f"well <answer>{row['response']}</answer>") == 1.0
        for wrong in ("", "nonsense", f"{row['response']} or 17", f"0 1 2 {row['response']} 3"):
            assert score(wrong) == 0.0


def test_reasoning_gym_settings_are_passed_on_and_wrong_ones_refused():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    [row] = reasoning_rows("chain_sum", size=1, seed=0, settings={"min_terms": 9, "max_terms": 9})
    assert row["prompt"].count("+") + row["prompt"].count("-") == 8
    for name, settings, complaint in (
        ("chain_sums", {}, "no data set"),
        ("chain_sum", {"terms": 3}, "terms"),
        ("countdown", {}, "evaluates text as Python"),
    ):
        with pytest.raises(ValueError, match=complaint):
            next(reasoning_rows(name, size=1, seed=0, settings=settings))


def test_scorers_that_evaluate_text_are_refused():
    """Read from the library's source: every scoring module that calls an evaluator is on the list."""
    library = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    harmless = {"basic_arithmetic", "propositional_logic", "gsm_symbolic"}  # their own expressions only
    evaluators = {"eval", "exec", "parse_expr", "sympify"}
    found = set()
    for name, (dataset, _) in library.factory.DATASETS.items():
        path = Path(sys.modules[dataset.__module__].__file__)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rsplit(".", 1)[-1]
                if called in evaluators:
                    found.add(name)
    assert found - harmless <= UNSAFE <= library.factory.DATASETS.keys()


def test_without_the_library_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'megatron_tlt\[rewards\]'"):
        next(reasoning_rows("chain_sum", size=1, seed=0))
