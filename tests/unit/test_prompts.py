"""Prompts from jsonl and parquet, and the cursor that hands each out exactly once."""

import json
from collections import Counter

import pyarrow
import pytest
from pyarrow import parquet

from megatron_tlt.data.prompts import (
    PromptCursor,
    PromptDataConfig,
    encode_prompt,
    epoch_order,
    load_chat_template,
    load_prompts,
    response_text,
)
from megatron_tlt.data.tokenizer_plain import ByteLevelTokenizer

TOKENIZER = ByteLevelTokenizer()


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_records_in_file_order(tmp_path):
    first = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "label": "2", "reward": "exact", "data_source": "sums", "metadata": {"k": 1}},
        {"prompt": "2+2=", "label": 4},
    )
    second = write(tmp_path / "b.jsonl", {"prompt": "x", "label": {"target": 3}})
    records = load_prompts(PromptDataConfig(prompt_data=[first, second]), TOKENIZER).records
    assert [record.prompt.prompt_id for record in records] == [0, 1, 2]
    assert records[0].prompt.tokens == tuple(b"1+1=")
    assert (records[0].reward, records[0].data_source) == ("exact", "sums")
    assert records[0].metadata == {"k": 1}
    assert records[1].label == "4" and records[1].reward == ""
    assert json.loads(records[2].label) == {"target": 3}


def test_parquet_in_the_layout_of_verl_is_read_by_its_keys(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(3)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = PromptDataConfig(
        prompt_data=[str(path)],
        label_key="reward_model.ground_truth",
        metadata_key="extra_info",
        chat_template=str(template),
    )
    record = load_prompts(config, TOKENIZER).records[2]
    assert record.text == "<user>What is 2?<assistant>"
    assert (record.label, record.data_source, record.metadata) == ("2", "openai/gsm8k", {"index": 2})


def test_a_chat_template_is_found_in_a_model_folder(tmp_path):
    settings = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    render = load_chat_template(str(tmp_path))
    assert render([{"role": "user", "content": "hi"}]) == "<s>hi"
    with pytest.raises(ValueError, match="nowhere"):
        load_chat_template(str(tmp_path / "nowhere"))


def test_prompts_that_are_too_long_are_counted_and_leave_the_numbers_of_others(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "long prompt", "label": ""},
        {"prompt": "short", "label": ""},
    )
    prompts = load_prompts(PromptDataConfig(prompt_data=[path], max_prompt_tokens=5), TOKENIZER)
    assert (len(prompts), prompts.num_too_long) == (1, 1)
    assert prompts.records[0].prompt.prompt_id == 1
    with pytest.raises(ValueError, match="2 longer than max_prompt_tokens 4"):
        load_prompts(PromptDataConfig(prompt_data=[path], max_prompt_tokens=4), TOKENIZER)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "x", "label": "1"}, "has no 'prompt'.*input_key"),
        ({"prompt": "x"}, "has no 'label'"),
        ({"prompt": [{"role": "user", "content": "x"}], "label": "1"}, "need chat_template"),
        ({"prompt": "x", "label": "1", "metadata": [1]}, "no mapping"),
        (["prompt"], "not a JSON object"),
    ],
)
def test_a_bad_row_is_named_with_its_place(tmp_path, row, complaint):
    path = write(tmp_path / "a.jsonl", {"prompt": "ok", "label": "1"}, row)
    with pytest.raises(ValueError, match=f"a.jsonl:2.*{complaint}"):
        load_prompts(PromptDataConfig(prompt_data=[path]), TOKENIZER)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    broken = tmp_path / "a.jsonl"
    broken.write_text('{"prompt": \n')
    (tmp_path / "a.csv").write_text("x")
    for name, complaint in (("a.jsonl", "a.jsonl:1: no JSON"), ("a.csv", "only"), ("b", "no file")):
        with pytest.raises(ValueError, match=complaint):
            load_prompts(PromptDataConfig(prompt_data=[str(tmp_path / name)]), TOKENIZER)


def test_a_prompt_begins_with_bos_where_the_tokenizer_has_one():
    class WithBos(ByteLevelTokenizer):
        bos = 1

    assert encode_prompt(WithBos(), "a") == [1, 97]
    assert encode_prompt(WithBos(), "a", add_bos=False) == [97]
    assert encode_prompt(TOKENIZER, "a") == [97]


def test_the_text_that_is_rewarded_lacks_only_the_stop_token_that_ended_it():
    end = TOKENIZER.eod
    assert response_text(TOKENIZER, [*b"ok", end], [end]) == "ok"
    assert response_text(TOKENIZER, [*b"ok"], [end]) == "ok"
    assert response_text(TOKENIZER, [], [end]) == ""
    assert response_text(TOKENIZER, [*b"a\nb\n"], [10]) == "a\nb"


def test_each_prompt_comes_exactly_once_an_epoch_also_in_batches_that_span_two():
    cursor = PromptCursor(size=10, seed=3)
    taken = [index for _ in range(10) for index in cursor.take(3)]
    for epoch in range(3):
        assert sorted(taken[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert taken[:10] != taken[10:20]
    assert cursor.consumed == 30 and cursor.epoch == 3


@pytest.mark.parametrize("cut", [0, 1, 7, 10, 13, 29])
def test_a_resumed_cursor_goes_on_with_the_next_prompt(cut):
    whole = PromptCursor(size=10, seed=3).take(30)
    before = PromptCursor(size=10, seed=3)
    first = before.take(cut)
    after = PromptCursor(size=10, seed=3)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert first + after.take(30 - cut) == whole
    assert set(Counter(first + whole[cut:]).values()) == {3}


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    assert epoch_order(50, seed=1, epoch=2, shuffle=True).tolist() == (
        epoch_order(50, seed=1, epoch=2, shuffle=True).tolist()
    )
    assert epoch_order(50, seed=1, epoch=2, shuffle=True).tolist() != (
        epoch_order(50, seed=2, epoch=1, shuffle=True).tolist()
    )
    assert PromptCursor(size=3, seed=9, shuffle=False).take(4) == [0, 1, 2, 0]


def test_a_cursor_of_other_data_seed_or_order_is_refused():
    state = PromptCursor(size=10, seed=3).state_dict()
    for other in (
        PromptCursor(size=11, seed=3),
        PromptCursor(size=10, seed=4),
        PromptCursor(size=10, seed=3, shuffle=False),
    ):
        with pytest.raises(ValueError, match="repeated or left out"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="size"):
        PromptCursor(size=0, seed=0)
