"""Synthetic tokens without files (`--mock-data`), which a small model learns in minutes."""

import numpy as np


class MockTokens:
    """Documents that count up by a stride of their own, modulo the number of symbols.

    Given two tokens of a document the rest follows, so the loss falls from ln(symbols) towards 0
    only when the model compares positions; Megatron's mock data counts by 1 from 1 always. Stride,
    start and length of document d are drawn once from a fixed seed: the same on every rank and in
    every run.
    """

    _NUM_DOCUMENTS = 100_000
    _MAX_LENGTH = 512
    _MAX_SYMBOLS = 1024
    _MAX_STRIDE = 8

    def __init__(self, *, vocab_size: int, eod: int | None) -> None:
        if vocab_size < 4:
            raise ValueError(f"mock data needs a vocabulary of 4 ids or more, got {vocab_size}")
        self._eod = vocab_size - 1 if eod is None else eod
        self._symbols = min(vocab_size - 1, self._MAX_SYMBOLS)
        self.fingerprint = f"mock-{self._symbols}-{self._eod}"
        rng = np.random.RandomState(1234)
        self.sequence_lengths = rng.randint(
            16, self._MAX_LENGTH, self._NUM_DOCUMENTS, dtype=np.int32
        )
        self._starts = rng.randint(0, self._symbols, self._NUM_DOCUMENTS)
        self._strides = rng.randint(1, self._MAX_STRIDE + 1, self._NUM_DOCUMENTS)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of document `index`, int64, as IndexedDataset.get."""
        end = int(self.sequence_lengths[index])
        stop = end if length is None else offset + length
        places = np.arange(offset, stop)
        tokens = (self._starts[index] + self._strides[index] * places) % self._symbols
        tokens[places == end - 1] = self._eod
        return tokens
