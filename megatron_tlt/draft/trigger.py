"""Whether the drafter is worth training now: a pure policy over measured acceptance.

TLT trains whenever a bubble is there. Idle ranks are free, but merging and publishing are not, so a
drafter that still does as well as it ever did may be left alone: it trains when a measured rate (of a draft
position, or of a bucket of response lengths) has fallen below its best by a margin, or when the policy has
moved on by some steps. The default, one step, trains in every bubble.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class TriggerConfig:
    """When the drafter is trained."""

    margin: float = 0.02
    """Train when a rate of acceptance is this far below the best that was seen."""
    stale_after: int = 1
    """Train when the policy is so many steps newer than the drafter's lessons; 1: in every step."""
    alarm: float = 1.2
    """Warn when a verification of the trained drafter's guesses brings fewer tokens than this."""

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1 or self.stale_after < 1 or self.alarm < 1:
            raise ValueError(
                f"margin={self.margin}, stale_after={self.stale_after}, alarm={self.alarm}: need "
                "0 <= margin < 1, stale_after >= 1, alarm >= 1"
            )


@dataclass(kw_only=True, slots=True)
class Trigger:
    """Remembers the best rates. Example: trigger.observe({"position_1": 0.8}); trigger.reason(age=1)."""

    config: TriggerConfig
    best: dict[str, float] = field(default_factory=dict)
    fallen: str = ""
    """The rate that is furthest below its best, beyond the margin; empty: none."""

    def observe(self, rates: Mapping[str, float]) -> None:
        """Rates of the newest rollout, each between 0 and 1; those that were not measured are left out."""
        worst, self.fallen = self.config.margin, ""
        for name, rate in rates.items():
            loss = self.best.get(name, rate) - rate
            if loss > worst:
                worst, self.fallen = loss, name
            self.best[name] = max(rate, self.best.get(name, rate))

    def reason(self, *, age: int) -> str:
        """Why to train now, or an empty string; `age`: policy steps since the drafter's newest lessons."""
        if age >= self.config.stale_after:
            return f"the policy is {age} steps newer"
        return f"{self.fallen} fell" if self.fallen else ""

    def alarms(self, accept_length: float) -> bool:
        """Whether drafting with the trained drafter is hardly worth it; 0: it was not used."""
        return 0 < accept_length < self.config.alarm

    def state_dict(self) -> dict[str, Any]:
        """Plain: may be written as JSON."""
        return {"best": dict(self.best), "fallen": self.fallen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.fallen = dict(state["best"]), state["fallen"]
