"""Tokenizers: exact round trips, no special tokens from text, fast paths equal slow ones."""

import argparse
import json
import os
import sysconfig
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megatron_tlt.data.tokenizer import (
    TokenizerConfig,
    add_tokenizer_arguments,
    build_tokenizer,
    require_eod,
    tokenizer_config,
)
from megatron_tlt.data.tokenizer_training import train_sentencepiece

TRICKY = "<|endoftext|>  two  spaces\n\n\ttab \r\n end\n 12345 naïve 日本 \U0001f600 </s><s><pad>\n"


@pytest.fixture(scope="module")
def text():
    return (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def files(tmp_path_factory, text):
    """A folder with `spm.model`, GPT-2-like `vocab.json` + `merges.txt`, and Hugging Face `hf/`."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text(text)
    train_sentencepiece([str(folder / "text.txt")], str(folder / "spm"), vocab_size=700)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(
        text.splitlines(keepends=True),
        tokenizers.trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>"],
            show_progress=False,
        ),
    )
    bpe.model.save(str(folder))
    (folder / "hf").mkdir()
    bpe.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}, "pad_token": None})
    )
    return folder


@pytest.fixture(scope="module")
def configs(files):
    return {
        "SentencePieceTokenizer": TokenizerConfig(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(files / "spm.model")
        ),
        "HuggingFaceTokenizer": TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(files / "hf")
        ),
        "GPT2BPETokenizer": TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(files / "vocab.json"),
            merge_file=str(files / "merges.txt"),
        ),
        "ByteLevelTokenizer": TokenizerConfig(tokenizer_type="ByteLevelTokenizer"),
    }


TEXT_TOKENIZERS = [
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "ByteLevelTokenizer",
]


@pytest.mark.parametrize("kind", TEXT_TOKENIZERS)
def test_text_comes_back_exactly(configs, text, kind):
    tokenizer = build_tokenizer(configs[kind])
    for sample in (text, TRICKY, "", "\n", " "):
        ids = tokenizer.tokenize(sample)
        assert tokenizer.detokenize(ids) == sample
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("kind", TEXT_TOKENIZERS)
def test_special_tokens_come_from_text_only_when_asked_for(configs, kind):
    tokenizer = build_tokenizer(configs[kind])
    eod = require_eod(tokenizer)
    plain = tokenizer.tokenize("a<|endoftext|>b")
    assert eod not in plain
    parsed = tokenizer.tokenize("a<|endoftext|>b", parse_special=True)
    assert parsed == [*tokenizer.tokenize("a"), eod, *tokenizer.tokenize("b")]
    assert tokenizer.tokenize("a<|endoftext|>b") == plain


@pytest.mark.parametrize("kind", TEXT_TOKENIZERS)
def test_identity_is_stable_under_use_and_rebuilding(configs, kind):
    tokenizer = build_tokenizer(configs[kind])
    identity = tokenizer.identity()
    tokenizer.tokenize(TRICKY, parse_special=True)
    assert tokenizer.identity() == identity == build_tokenizer(configs[kind]).identity()
    assert identity["type"] == kind
    assert identity["vocab_size"] == tokenizer.vocab_size
    json.dumps(identity)


def test_identity_differs_when_files_differ(files, configs, tmp_path):
    merges = (files / "merges.txt").read_text().splitlines()
    (tmp_path / "merges.txt").write_text("\n".join(merges[:-1]))
    other = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(files / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )
    ours = build_tokenizer(configs["GPT2BPETokenizer"])
    assert build_tokenizer(other).identity() != ours.identity()


def test_sentencepiece_by_lines_equals_the_whole_text(files, configs, text):
    model = sentencepiece.SentencePieceProcessor(model_file=str(files / "spm.model"))
    tokenizer = build_tokenizer(configs["SentencePieceTokenizer"])
    assert tokenizer._cut_at_newlines
    for sample in (text, TRICKY):
        assert tokenizer.tokenize(sample) == model.encode(sample)


def test_sentencepiece_that_puts_a_space_first_is_not_cut(files, tmp_path):
    """Llama's models do: cut into lines they would give other ids."""
    sentencepiece.SentencePieceTrainer.train(
        input=str(files / "text.txt"),
        model_prefix=str(tmp_path / "dummy"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    config = TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "dummy.model")
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "dummy.model"))
    tokenizer = build_tokenizer(config)
    assert not tokenizer._cut_at_newlines
    assert tokenizer.tokenize(TRICKY) == model.encode(TRICKY)
    assert tokenizer.eod == model.eos_id()


def test_trained_sentencepiece_has_the_documented_special_ids(configs):
    tokenizer = build_tokenizer(configs["SentencePieceTokenizer"])
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad) == (1, 2, 2, 3)


def test_gpt2_in_pieces_equals_the_whole_text(configs, text):
    tokenizer = build_tokenizer(configs["GPT2BPETokenizer"])
    for sample in (text, "\n".join([TRICKY] * 200), "x " * 5000 + "\n" * 50 + "y"):
        assert tokenizer.tokenize(sample) == tokenizer._bpe.encode(sample).ids


def test_hugging_face_folder_and_file_and_gpt2_files_give_the_same_ids(files, configs, text):
    from_files = build_tokenizer(configs["GPT2BPETokenizer"])
    for name in ("hf", "hf/tokenizer.json"):
        config = TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(files / name)
        )
        tokenizer = build_tokenizer(config)
        assert tokenizer.tokenize(text) == from_files.tokenize(text)
        assert tokenizer.eod == from_files.eod
        assert tokenizer.pad is None


def test_real_gpt2_files_give_published_ids():
    folder = os.environ.get("MEGATRON_TLT_DATA")
    if folder is None:
        pytest.skip("MEGATRON_TLT_DATA is unset")
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=f"{folder}/gpt2_bpe/vocab.json",
            merge_file=f"{folder}/gpt2_bpe/merges.txt",
        )
    )
    assert tokenizer.tokenize("Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)


def test_null_tokenizer_reads_numbers_as_megatron_does():
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
    assert tokenizer.tokenize("1 8 9") == [1, 8, 9]
    assert tokenizer.detokenize([1, 8]) == "1 8"
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    with pytest.raises(ValueError, match=r"0\.\.9"):
        tokenizer.tokenize("10")


def test_tokenizer_without_eod_says_so_when_asked_for_it(tmp_path, text):
    (tmp_path / "text.txt").write_text(text)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "no_eos"),
        vocab_size=300,
        model_type="bpe",
        eos_id=-1,
        bos_id=-1,
        minloglevel=2,
    )
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=str(tmp_path / "no_eos.model"),
        )
    )
    assert tokenizer.eod is None
    with pytest.raises(ValueError, match=r"no end-of-document token.*--append-eod"):
        require_eod(tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file and --merge-file"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "needs --tokenizer-model"),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "nowhere"},
            "nowhere is no file",
        ),
        ({"tokenizer_type": "NullTokenizer"}, "needs --vocab-size"),
        ({"tokenizer_type": "Unheard"}, "Unheard is none of SentencePieceTokenizer"),
    ],
)
def test_unusable_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(TokenizerConfig(**options))


def test_flags_make_the_config():
    parser = argparse.ArgumentParser()
    add_tokenizer_arguments(parser)
    args = parser.parse_args(["--tokenizer-type", "NullTokenizer", "--vocab-size", "7"])
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=7)
    assert tokenizer_config(vars(args) | {"other": 1}) == config
