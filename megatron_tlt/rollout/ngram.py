"""Suffix index of token sequences: what came after these tokens last time?"""

from collections.abc import Sequence


class NgramIndex:
    """Continuations of n-grams over several growing sequences (a prompt and all samples of its group).

    Keeps the newest occurrence of each n-gram. Costs one dictionary entry a token and n-gram length.
    """

    def __init__(self, *, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n={min_n}, max_n={max_n}: need 1 <= min_n <= max_n")
        self.sizes = range(max_n, min_n - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}

    def extend(self, sequence: Sequence[int], *, start: int) -> None:
        """Take in `sequence[start:]`; what is before `start` was given earlier."""
        for position in range(max(start, 1), len(sequence)):
            for n in self.sizes:
                if position >= n:
                    self.after[tuple(sequence[position - n : position])] = sequence[position]

    def propose(self, sequence: Sequence[int], *, count: int) -> list[int]:
        """Up to `count` tokens that may follow `sequence`, longest match first at each of them."""
        longest = self.sizes[0]
        tail = list(sequence[-longest:])
        first = len(tail)
        while len(tail) - first < count:
            for n in self.sizes:
                if len(tail) >= n and (token := self.after.get(tuple(tail[-n:]))) is not None:
                    tail.append(token)
                    break
            else:
                break
        return tail[first:]
