"""Train a SentencePiece BPE tokenizer on documents."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from megatron_tlt.data.corpus import read_documents
from megatron_tlt.data.files import expand_inputs, publish

EOD_PIECE = "<|endoftext|>"
_MAX_LINE_BYTES = 16384


def train_sentencepiece(
    inputs: Iterable[str],
    output_prefix: str,
    *,
    vocab_size: int,
    key: str = "text",
    num_threads: int = 1,
    max_bytes: int | None = None,
) -> Path:
    """Train on the first `max_bytes` of text and publish `<output_prefix>.model`.

    Ids: 0 `<unk>` (never produced: unknown characters fall back to bytes), 1 `<s>` (bos, never
    added by itself), 2 `<|endoftext|>` (eos and end of document in one), 3 `<pad>`, then 256 bytes,
    then pieces. 2 and 3 are control symbols: text that spells them is cut into ordinary pieces.
    Digits are split, white space is kept exactly and no space is put before a text, so
    detokenize(tokenize(x)) == x. Raises ValueError when the text is too small for `vocab_size`.
    """
    files = expand_inputs(inputs)
    lines = _lines((text for file in files for text in read_documents(file, key)), max_bytes)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_MAX_LINE_BYTES,
            num_threads=num_threads,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            eos_piece=EOD_PIECE,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"cannot train {vocab_size} pieces on {list(inputs)}: {error}") from error
    path = Path(f"{output_prefix}.model")
    path.parent.mkdir(parents=True, exist_ok=True)
    with publish(path) as temporary:
        temporary.write_bytes(model.getvalue())
    return path


def _lines(texts: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    """Non-blank lines, until `max_bytes` of them: the trainer's sentences."""
    taken = 0
    for text in texts:
        for line in text.split("\n"):
            if max_bytes is not None and taken >= max_bytes:
                return
            if line.strip():
                taken += len(line.encode("utf-8")) + 1
                yield line
