"""The data tools as a user calls them: flags in, files and exit codes out."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)
from megatron_tlt.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_tlt.data.provenance import read_provenance
from megatron_tlt.data.tokenizer import TokenizerConfig, build_tokenizer
from megatron_tlt.data.tokenizer_plain import ByteLevelTokenizer

from megatron.core.datasets import indexed_dataset as megatron_indexed  # isort: skip

TOOLS = Path(__file__).parents[2] / "tools"
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
TEXTS = ["first document", "second", "日本\n", "x" * 5000, "last"]


def run(tool, *argv):
    """Exit code of `tools/<tool>.py` called in this process."""
    spec = importlib.util.spec_from_file_location(tool, TOOLS / f"{tool}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(word) for word in argv])


def write_lines(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def contents(prefix):
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")]


def preprocess(tmp_path, texts, *flags, name="out"):
    source = write_lines(tmp_path / f"{name}.jsonl", texts)
    assert (
        run("preprocess_data", "--input", source, "--output-prefix", tmp_path / name, *flags) == 0
    )
    return tmp_path / f"{name}_text_document"


def test_preprocess_writes_what_megatron_reads_with_eod_in_the_lengths(tmp_path):
    prefix = preprocess(tmp_path, TEXTS, *BYTES, "--append-eod")
    data = megatron_indexed.IndexedDataset(str(prefix))
    tokenizer = ByteLevelTokenizer()
    expected = [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS]
    assert [data[i].tolist() for i in range(len(data))] == expected
    assert data.sequence_lengths.tolist() == [len(ids) for ids in expected]
    assert data.document_indices.tolist() == list(range(len(TEXTS) + 1))
    assert read_provenance(prefix)["tokenizer"] == tokenizer.identity()


def test_preprocess_survives_an_empty_first_document(tmp_path, capsys):
    prefix = preprocess(tmp_path, ["", "kept", ""], *BYTES, "--append-eod")
    assert [document.tolist() for document in IndexedDataset(prefix)] == [[*b"kept", 256]]
    assert "1 documents, 5 tokens" in (output := capsys.readouterr().out)
    assert "skipped 2 empty documents" in output


def test_preprocess_gives_the_same_bytes_for_any_number_of_workers(tmp_path, monkeypatch):
    # Batches of a few documents, so that two workers really take turns.
    monkeypatch.setattr("megatron_tlt.data.preprocess._BATCH_CHARACTERS", 40)
    texts = [f"{word} {number}" for number in range(60) for word in TEXTS[:3]]
    prefixes = [
        preprocess(tmp_path, texts, *BYTES, "--append-eod", "--workers", n, name=f"w{n}")
        for n in (1, 2)
    ]
    assert contents(prefixes[0]) == contents(prefixes[1])
    assert len(IndexedDataset(prefixes[0])) == len(texts)


def test_preprocess_lists_bad_lines_and_goes_on_unless_strict(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n\n{broken\n{"text": "b"}\n')
    arguments = ["--input", source, "--output-prefix", tmp_path / "out", *BYTES]
    assert run("preprocess_data", *arguments) == 0
    captured = capsys.readouterr()
    assert f"{source}:2: blank line" in captured.err
    assert f"{source}:3:" in captured.err
    assert "1 blank and 1 invalid lines" in captured.out
    with pytest.raises(ValueError, match=r"in\.jsonl:2: blank line"):
        run("preprocess_data", *arguments, "--strict")


def test_preprocess_takes_several_keys_and_inputs(tmp_path):
    for name in ("b", "a"):
        line = json.dumps({"question": f"q{name}", "answer": f"a{name}"})
        (tmp_path / f"{name}.jsonl").write_text(line + "\n")
    run(
        "preprocess_data",
        *("--input", tmp_path / "*.jsonl", "--output-prefix", tmp_path / "out"),
        *("--json-keys", "question", "answer", *BYTES),
    )
    for key, expected in (("question", [b"qa", b"qb"]), ("answer", [b"aa", b"ab"])):
        data = IndexedDataset(tmp_path / f"out_{key}_document")
        assert [bytes(document.tolist()) for document in data] == expected


def test_preprocess_without_any_document_says_why_and_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"no document.*2 empty"):
        preprocess(tmp_path, ["", ""], *BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_append_eod_with_a_tokenizer_without_one_is_refused_at_once(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(
        str(file)
    )
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", file, "--append-eod"]
    with pytest.raises(ValueError, match="no end-of-document token"):
        preprocess(tmp_path, TEXTS, *flags)


def test_merge_equals_megatrons_merge_and_one_preprocessing(tmp_path):
    (tmp_path / "shards").mkdir()
    parts = [TEXTS[:2], TEXTS[2:]]
    prefixes = [
        preprocess(tmp_path / "shards", texts, *BYTES, "--append-eod", name=name)
        for name, texts in zip("ab", parts, strict=True)
    ]
    merged = tmp_path / "merged"
    assert run("merge_datasets", "--input", tmp_path / "shards", "--output-prefix", merged) == 0
    builder = megatron_indexed.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.uint16)
    for prefix in prefixes:
        builder.add_index(str(prefix))
    builder.finalize(str(tmp_path / "m.idx"))
    assert contents(merged)[:2] == [(tmp_path / f"m.{end}").read_bytes() for end in ("bin", "idx")]
    assert contents(merged) == contents(preprocess(tmp_path, TEXTS, *BYTES, "--append-eod"))


def test_merge_refuses_what_does_not_belong_together(tmp_path):
    for name, dtype in (("a", np.uint16), ("b", np.int32)):
        with IndexedDatasetWriter(tmp_path / name, dtype=dtype) as writer:
            writer.add_document([1, 2])
    paths = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(ValueError, match=r"token types differ.*a': 'uint16'.*b': 'int32'"):
        run("merge_datasets", "--input", *paths, "--output-prefix", tmp_path / "c")
    with pytest.raises(ValueError, match="is one of the inputs"):
        run("merge_datasets", "--input", paths[0], "--output-prefix", paths[0])
    with_eod = preprocess(tmp_path, TEXTS, *BYTES, "--append-eod", name="with")
    without = preprocess(tmp_path, TEXTS, *BYTES, name="without")
    with pytest.raises(ValueError, match="different tokenizers or settings"):
        run("merge_datasets", "--input", with_eod, without, "--output-prefix", tmp_path / "c")


def inspect(prefix, capsys, *flags):
    """Exit code and report of inspect_data; drops what was printed before."""
    capsys.readouterr()
    code = run("inspect_data", "--data-prefix", prefix, "--json", *flags)
    return code, json.loads(capsys.readouterr().out)


def failed(report):
    return [check["name"] for check in report["checks"] if not check["passed"]]


def test_inspect_counts_documents_tokens_and_repeats(tmp_path, capsys):
    prefix = preprocess(tmp_path, [*TEXTS, "second"], *BYTES, "--append-eod")
    code, report = inspect(prefix, capsys, *BYTES)
    assert (code, failed(report)) == (0, [])
    assert (report["documents"], report["duplicate_documents"]) == (6, 1)
    assert report["tokens"] == sum(len(text.encode()) + 1 for text in [*TEXTS, "second"])
    assert report["document_length_quantiles"]["100%"] == 5001
    assert report["samples"][0] == "first document"


@pytest.mark.parametrize(
    ("documents", "flags", "name"),
    [
        ([[1, 2, 300]], BYTES, "ids are in the vocabulary"),
        ([[1, 256], [1]], BYTES, "all documents end with the end-of-document token, or none does"),
        ([[1], []], [], "there are documents, none of them empty"),
        ([], [], "there are documents, none of them empty"),
    ],
)
def test_inspect_fails_on_unfit_files(tmp_path, capsys, documents, flags, name):
    with IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    code, report = inspect(tmp_path / "data", capsys, *flags)
    assert code == 1
    assert failed(report) == [name]


def test_inspect_fails_on_a_truncated_file_and_another_tokenizer(tmp_path, capsys):
    prefix = preprocess(tmp_path, TEXTS, *BYTES)
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "400"]
    code, report = inspect(prefix, capsys, *null)
    assert (code, failed(report)) == (1, ["tokenizer is the one that made the file"])
    file = Path(f"{prefix}.bin")
    file.write_bytes(file.read_bytes()[:-1])
    code, report = inspect(prefix, capsys)
    assert (code, failed(report)) == (1, ["files are consistent"])


def test_prepared_corpus_trains_a_tokenizer_and_is_preprocessed(tmp_path):
    """The first three commands of a new user, on a small corpus."""
    (tmp_path / "in").mkdir()
    source = Path(json.__file__).parent
    for file in source.glob("*.py"):
        (tmp_path / "in" / file.name).write_bytes(file.read_bytes())
    corpus = tmp_path / "corpus"
    assert run("prepare_corpus", "--source", tmp_path / "in", "--output-dir", corpus) == 0
    train = corpus / "train.jsonl"
    assert (
        run(
            "train_tokenizer",
            *("--input", train, "--vocab-size", 400, "--output-prefix", tmp_path / "spm"),
            *("--max-bytes", 20_000),
        )
        == 0
    )
    model = tmp_path / "spm.model"
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
    run("preprocess_data", "--input", train, "--output-prefix", tmp_path / "data", *flags)
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model))
    )
    texts = [json.loads(line)["text"] for line in train.read_text().splitlines()]
    data = IndexedDataset(tmp_path / "data_text_document")
    assert [tokenizer.detokenize(document.tolist()) for document in data] == texts
    assert tokenizer.vocab_size == 400


def test_tokenizer_training_on_too_little_text_is_refused(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ["tiny"])
    with pytest.raises(ValueError, match="cannot train 5000 pieces"):
        run(
            "train_tokenizer",
            *("--input", source, "--vocab-size", 5000, "--output-prefix", tmp_path / "spm"),
        )
