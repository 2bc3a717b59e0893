"""How many drafts the target takes, by drafter, by position in the draft and by length of the response.

Counts are plain pairs under flat names, so that they add up over ranks and may be written as JSON.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

Counts = dict[str, tuple[int, int]]
_FIRST_BUCKET = 64  # bucket 0: responses below so many tokens; each further one is twice as wide


class Acceptance:
    """Example: acceptance.observe("eagle", length=70, levels=3, accepted=1); acceptance.take()."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, int, int, int]] = Counter()

    def observe(self, drafter: str, *, length: int, levels: int, accepted: int) -> None:
        """One verification of a draft of `levels` levels when the response had `length` tokens."""
        self._seen[drafter, (length // _FIRST_BUCKET).bit_length(), levels, accepted] += 1

    def take(self) -> Counts:
        """(trials, hits) by "drafter/kind/index" since the last call."""
        seen, self._seen = self._seen, Counter()
        return add_counts(_expand(*key, times=times) for key, times in seen.items())


def _expand(drafter: str, bucket: int, levels: int, accepted: int, *, times: int) -> Counts:
    counts = {
        f"{drafter}/position/{i}": (times, times * (accepted >= i)) for i in range(1, levels + 1)
    }
    counts[f"{drafter}/bucket/{bucket}"] = (times * levels, times * accepted)
    counts[f"{drafter}/all/0"] = (times, times * accepted)
    return counts


def add_counts(everyone: Iterable[Counts]) -> Counts:
    """Sums over ranks."""
    total: Counts = {}
    for counts in everyone:
        for name, (trials, hits) in counts.items():
            before = total.get(name, (0, 0))
            total[name] = (before[0] + trials, before[1] + hits)
    return total


def accept_length(counts: Mapping[str, tuple[int, int]], drafters: Iterable[str]) -> float:
    """Tokens a verification, bonus included, over some drafters together; 0 where none was used."""
    pairs = [counts.get(f"{drafter}/all/0", (0, 0)) for drafter in drafters]
    trials = sum(pair[0] for pair in pairs)
    return 1 + sum(pair[1] for pair in pairs) / trials if trials else 0.0


def rates(counts: Mapping[str, tuple[int, int]], drafter: str, kind: str) -> dict[int, float]:
    """Hits over trials by index: of "position" the share of the drafts so long of which that many stay, of
    "bucket" the share of drafted levels that stay."""
    prefix = f"{drafter}/{kind}/"
    found = {int(name.removeprefix(prefix)): pair for name, pair in counts.items() if name.startswith(prefix)}
    return {index: hits / trials for index, (trials, hits) in sorted(found.items())}
