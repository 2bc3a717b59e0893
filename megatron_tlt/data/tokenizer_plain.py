"""Tokenizers without files, for demos and tests, and the cutting of text at special tokens."""

import re
from collections.abc import Callable, Mapping, Sequence


def tokenize_with_special(
    text: str, special: Mapping[str, int], encode: Callable[[str], list[int]]
) -> list[int]:
    """Ids of `text`, in which the spellings in `special` stand for their ids."""
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        if part:
            ids.extend([special[part]] if part in special else encode(part))
    return ids


class ByteLevelTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 ends a document. Needs no files."""

    vocab_size, eod, pad, bos, eos = 257, 256, None, None, 256

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        if parse_special:
            return tokenize_with_special(text, {"<|endoftext|>": self.eod}, self.tokenize)
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def identity(self) -> dict[str, str | int]:
        return {"type": "ByteLevelTokenizer", "vocab_size": self.vocab_size, "sha256": ""}


class NullTokenizer:
    """Text is numbers between blanks. End of document is `vocab_size`, as in Megatron."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size} of a NullTokenizer must be at least 1")
        self.vocab_size = vocab_size + 1
        self.eod = self.eos = vocab_size
        self.pad = self.bos = None

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"NullTokenizer got ids {min(ids)}..{max(ids)}, has 0..{self.vocab_size - 1}"
            )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def identity(self) -> dict[str, str | int]:
        return {"type": "NullTokenizer", "vocab_size": self.vocab_size, "sha256": ""}
