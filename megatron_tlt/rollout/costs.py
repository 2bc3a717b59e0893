"""What a decode step costs, by strategy and batch size: measured once, then a prior and a simulator's
clock.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_tlt.types import StepRecord


@dataclass(slots=True)
class CostTable:
    """Seconds of a step as {str(strategy): {batch: seconds}}, and of one prompt token's prefill."""

    steps: dict[str, dict[int, float]] = field(default_factory=dict)
    prefill_token: float = 0.0

    def seconds(self, strategy: str, batch: int) -> float:
        """A step's seconds; between measured batch sizes linear, beyond them the last line goes on.

        Raises ValueError for a strategy that was not measured.
        """
        if strategy not in self.steps:
            raise ValueError(f"no cost of {strategy!r} was measured: known are {sorted(self.steps)}")
        known = sorted(self.steps[strategy].items())
        if len(known) == 1:
            return known[0][1]
        upper = next((i for i, (size, _) in enumerate(known) if size >= batch), len(known) - 1)
        (a, low), (b, high) = known[max(upper - 1, 0)], known[max(upper, 1)]
        return max(low + (high - low) * (batch - a) / (b - a), min(low, high) / 2)

    @staticmethod
    def of_records(records: Iterable[StepRecord]) -> "CostTable":
        """Typical costs in an engine's step records, the prefill's apart.

        A step in which a strategy found nothing to draft counts for that strategy: its mean cost is what a
        run of it pays.
        """
        seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        prefill: list[float] = []
        for record in records:
            total = (record.target_ms + record.draft_ms + record.other_ms) / 1000
            if record.prefill_tokens:
                prefill.append(record.prefill_ms / 1000 / record.prefill_tokens)
                total -= record.prefill_ms / 1000
            seconds[str(record.strategy)][record.batch].append(total)
        steps = {
            name: {batch: _typical(values) for batch, values in sizes.items()}
            for name, sizes in seconds.items()
        }
        return CostTable(steps, statistics.median(prefill) if prefill else 0.0)

    def to_json(self) -> dict[str, Any]:
        steps = {n: {str(b): s for b, s in sorted(x.items())} for n, x in self.steps.items()}
        return {"steps": steps, "prefill_token": self.prefill_token}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "CostTable":
        steps = {n: {int(b): float(s) for b, s in x.items()} for n, x in value["steps"].items()}
        return CostTable(steps, float(value["prefill_token"]))


def _typical(values: list[float]) -> float:
    """The mean without what a busy machine added: values beyond three medians are left out."""
    limit = 3 * statistics.median(values)
    return statistics.fmean(value for value in values if value <= limit)
