"""SentencePiece models (`.model`): Llama's family, and what `tools/train_tokenizer.py` makes."""

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import sentencepiece

from megatron_tlt.data.files import sha256_of_files
from megatron_tlt.data.tokenizer_plain import tokenize_with_special

_EOD_PIECES = ("<|endoftext|>", "<eod>", "<EOD>")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_SPACE = "\u2581"


class SentencePieceTokenizer:
    """End of document: a piece of `_EOD_PIECES`, else the model's eos (as Megatron)."""

    def __init__(self, model_file: str | Path) -> None:
        self._path = Path(model_file)
        if not self._path.is_file():
            raise ValueError(
                f"--tokenizer-model {model_file} is no file: want a SentencePiece .model"
            )
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        except RuntimeError as error:
            raise ValueError(
                f"--tokenizer-model {model_file} is damaged or no SentencePiece .model file"
            ) from error
        self.vocab_size = self._model.vocab_size()
        pieces = [self._model.id_to_piece(i) for i in range(self.vocab_size)]
        self.bos = _id_or_none(self._model.bos_id())
        self.eos = _id_or_none(self._model.eos_id())
        self.pad = _id_or_none(self._model.pad_id())
        self.eod = next((pieces.index(piece) for piece in _EOD_PIECES if piece in pieces), self.eos)
        self._special = {pieces[i]: i for i in range(self.vocab_size) if self._model.is_control(i)}
        self._cut_at_newlines = self._lines_are_independent(pieces)

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        if parse_special and self._special:
            return tokenize_with_special(text, self._special, self.tokenize)
        if self._cut_at_newlines:
            lines = _LINE.findall(text)
            return list(chain.from_iterable(self._model.encode(lines, num_threads=1)))
        return self._model.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids))

    def identity(self) -> dict[str, str | int]:
        digest = sha256_of_files(self._path)
        return {"type": "SentencePieceTokenizer", "vocab_size": self.vocab_size, "sha256": digest}

    def _lines_are_independent(self, pieces: list[str]) -> bool:
        """Whether encoding line by line gives the ids of the whole text (it is 3 times as fast).

        True when nothing reaches over a newline: no piece joins one to other characters, white
        space is kept as it is, and no space is put before a text.
        """
        probe = "\n a  b\n\n  c \nd\n"
        return (
            not any("\n" in piece and len(piece) > 1 for piece in pieces)
            and self._model.decode(self._model.encode(probe)) == probe
            and not self._model.encode("a", out_type=str)[0].startswith(_SPACE)
        )


def _id_or_none(index: int) -> int | None:
    return None if index < 0 else index
