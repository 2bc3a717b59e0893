"""Windows, documents, tables and text pieces of evaluation and generation; no process group."""

import json

import pytest

from megatron_tlt.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_tlt.data.tokenizer_plain import ByteLevelTokenizer
from megatron_tlt.evaluate import table
from megatron_tlt.evaluation.decoding import DecodingConfig, TextStream
from megatron_tlt.evaluation.scoring import (
    Score,
    ScoringConfig,
    cut_windows,
    read_scored_documents,
)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 23])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_every_token_but_the_first_counts_once_in_order(length, stride):
    ids = list(range(100, 100 + length))
    counted = []
    for window in cut_windows(ids, seq_length=8, stride=stride):
        assert len(window.ids) <= 9
        assert window.ids == list(range(window.ids[0], window.ids[0] + len(window.ids)))
        counted += window.ids[-window.counted :]
    assert counted == ids[1:]


def test_smaller_strides_give_more_context():
    windows = list(cut_windows(list(range(40)), seq_length=8, stride=2))
    assert all(len(window.ids) - window.counted == 7 for window in windows[4:-1])


def test_text_and_indexed_files_give_the_same_documents(tmp_path):
    texts = ["naïve café", "b" * 20]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    tokenizer = ByteLevelTokenizer()
    with IndexedDatasetWriter(tmp_path / "a", dtype=token_dtype(257)) as writer:
        for text in texts:
            writer.add_document([*tokenizer.tokenize(text), tokenizer.eod])
    from_text, from_index = (
        list(read_scored_documents(ScoringConfig(data_path=str(path)), tokenizer))
        for path in (tmp_path / "a.jsonl", tmp_path / "a")
    )
    assert from_text == from_index
    assert [document.num_bytes for document in from_text] == [12, 20]


def test_a_byte_limit_never_cuts_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "ééé"}))
    config = ScoringConfig(data_path=str(tmp_path / "a.jsonl"), max_bytes_per_document=5)
    (document,) = read_scored_documents(config, ByteLevelTokenizer())
    assert bytes(document.ids).decode() == "éé" and document.num_bytes == 4


def test_streamed_pieces_are_whole_characters_and_join_to_the_text():
    text = "naïve — 東京 🙂"
    stream = TextStream(ByteLevelTokenizer().detokenize)
    pieces = [stream.add(byte) for byte in text.encode()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.rest() == text


def test_streaming_keeps_the_blank_that_a_decoder_drops_at_the_start():
    words = {1: "▁a", 2: "▁b", 3: "c"}

    def detokenize(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(detokenize, prompt=[1])
    assert [stream.add(2), stream.add(3), stream.add(1)] == [" b", "c", " a"]


@pytest.mark.parametrize(
    "change", [dict(temperature=-1.0), dict(top_p=0.0), dict(top_k=-1), dict(max_new_tokens=0)]
)
def test_decoding_options_out_of_range_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        DecodingConfig(**change)


def test_the_table_shows_two_models_and_their_difference():
    facts = dict(
        iteration=None, perplexity=7.4, num_documents=1, num_tokens=5, num_bytes=9, seconds=0.1
    )
    scores = [
        Score(load="runs/dense", loss=2.0, bits_per_byte=1.25, **facts),
        Score(load="runs/est", loss=2.5, bits_per_byte=1.5, **facts),
    ]
    lines = table(scores).splitlines()
    assert lines[0].split() == ["dense", "est", "difference"]
    assert next(x for x in lines if x.startswith("bits")).split()[1:] == ["1.2500", "1.5000", "0.2500"]
