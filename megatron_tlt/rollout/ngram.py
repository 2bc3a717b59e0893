"""Suffix index of token sequences: what came after these tokens last time? Bounded in memory."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice


class NgramIndex:
    """Continuations of n-grams over several growing sequences (a prompt and all samples of its group).

    Keeps the newest occurrence of each n-gram; costs one dictionary entry a token and n-gram length. Beyond
    `max_entries` the n-grams that were learned first are forgotten, a quarter at a time.
    """

    def __init__(self, *, min_n: int = 2, max_n: int = 4, max_entries: int = 1 << 20) -> None:
        if not 1 <= min_n <= max_n or max_entries < 4:
            raise ValueError(
                f"min_n={min_n}, max_n={max_n}, max_entries={max_entries}: need 1 <= min_n <= max_n and "
                "max_entries >= 4"
            )
        self.sizes, self.max_entries = range(max_n, min_n - 1, -1), max_entries
        self.after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self.after)

    def extend(self, sequence: Sequence[int], *, start: int) -> None:
        """Take in `sequence[start:]`; what is before `start` was given earlier."""
        after = self.after
        for position in range(max(start, 1), len(sequence)):
            token = sequence[position]
            for n in self.sizes:
                if position >= n:
                    after[tuple(sequence[position - n : position])] = token
            if len(after) > self.max_entries:
                for key in list(islice(after, self.max_entries // 4 + 1)):
                    del after[key]

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


class NgramStore:
    """One index a prompt, shared by its samples and epochs; the least recently used prompts are dropped.

    Holds at most `max_entries` n-grams over all prompts whenever `trim` has run.
    """

    def __init__(self, *, max_entries: int = 1 << 22) -> None:
        self.max_entries = max_entries
        self.indexes: OrderedDict[int, NgramIndex] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self.indexes.values()))

    def index(self, prompt_id: int) -> NgramIndex:
        """The prompt's index, made at first sight. A running request keeps its index when it is dropped."""
        found = self.indexes.pop(prompt_id, None)
        if found is None:
            found = NgramIndex(max_entries=max(4, self.max_entries // 4))
            self.trim()
        self.indexes[prompt_id] = found
        return found

    def trim(self) -> None:
        """Drop prompts until the bound holds."""
        entries = len(self)
        while entries > self.max_entries:
            _, index = self.indexes.popitem(last=False)
            entries -= len(index)

    def clear(self) -> None:
        self.indexes.clear()
