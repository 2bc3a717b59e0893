"""Which speculation strategy to run next: the paper's BEG-MAB, with "off" as an arm.

Bucketed epsilon-greedy multi-armed bandit (TLT, algorithm 1): inside the bucket of the running
batch size, the arm with the best median tokens/s over a sliding window, or with probability epsilon
another one. What differs: "off" is an ordinary arm; the reward is the step's own tokens/s; a
measured cost profile stands in for arms not tried yet; an arm must win by a margin before it
replaces the current one; an arm that could not win were all its drafts accepted is not tried to the end;
exploration skips hopeless arms most of the time; the state can be saved.
"""

import bisect
import math
import random
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_tlt.types import OFF, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What the engine knows before a step. Example: StepContext(accept_rate=0.6, remaining=200.0)."""

    accept_rate: float = 0.7
    """Mean chance, over the running requests, that the next draft token is accepted."""
    remaining: float = math.inf
    """Mean tokens that the running requests may still emit."""
    draft_version: int = 0
    """Version of the trained drafter."""


NO_CONTEXT = StepContext()


class StrategyPolicy(Protocol):
    """Chooses a strategy before each decode step and learns from what the step brought."""

    def select(self, batch: int, context: StepContext = NO_CONTEXT) -> Strategy:
        """Strategy for a step of `batch` running requests."""

    def record(self, strategy: Strategy, *, batch: int, tokens: int, seconds: float) -> None:
        """One step emitted `tokens` in `seconds`."""


@dataclass(kw_only=True, slots=True)
class FixedPolicy:
    """Always the same strategy; "off" above `max_batch` running requests where that is given."""

    strategy: Strategy = OFF
    max_batch: int | None = None
    """Elastic switch: speculation runs at or below this batch size only."""

    def select(self, batch: int, context: StepContext = NO_CONTEXT) -> Strategy:
        return OFF if self.max_batch is not None and batch > self.max_batch else self.strategy

    def record(self, strategy: Strategy, *, batch: int, tokens: int, seconds: float) -> None:
        """A fixed strategy learns nothing."""


@dataclass(kw_only=True, slots=True)
class TunerConfig:
    """Settings of `BanditTuner`."""

    thresholds: tuple[int, ...] = (1, 2, 5, 21)
    """First batch size of each bucket, ascending; the last bucket is open-ended."""
    window: int = 50
    """Rewards kept for each arm and bucket."""
    epsilon: float = 0.02
    """Probability of a step that tries another arm."""
    margin: float = 0.03
    """Relative gain in tokens/s that another arm must show before it replaces the current one."""
    hopeless: float = 0.7
    """Below this fraction of the best arm an arm is explored ten times less often."""
    warmup: int = 3
    """Steps of an arm's first trial."""
    seed: int = 0
    """Seed of the exploration."""

    def __post_init__(self) -> None:
        ascending = list(self.thresholds) == sorted(set(self.thresholds))
        if not self.thresholds or self.thresholds[0] != 1 or not ascending:
            raise ValueError(f"thresholds={self.thresholds} must start at 1 and ascend")
        if not (0 <= self.epsilon <= 1 and self.window >= 1 and self.warmup >= 1):
            raise ValueError(
                f"epsilon={self.epsilon}, window={self.window}, warmup={self.warmup}: "
                "need 0 <= epsilon <= 1, window >= 1, warmup >= 1"
            )


class BanditTuner:
    """BEG-MAB over `strategies` (each bucket sees all of them unless `arms` says otherwise).

    `arms[i]` lists the strategies of bucket i (the paper gives wide trees to small batches). `prior` holds
    predicted tokens/s as {(bucket, str(strategy)): value}; an arm without prior is tried at first sight.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        config: TunerConfig | None = None,
        *,
        arms: Sequence[Sequence[Strategy]] | None = None,
        prior: Mapping[tuple[int, str], float] | None = None,
    ) -> None:
        self.config = config or TunerConfig()
        buckets = len(self.config.thresholds)
        self.arms = [list(a) for a in arms] if arms is not None else [list(strategies)] * buckets
        if len(self.arms) != buckets or not all(self.arms):
            raise ValueError(
                f"{len(self.arms)} lists of arms for {buckets} buckets: give each bucket at least one arm"
            )
        self.prior = dict(prior or {})
        self.rewards: dict[tuple[int, str], deque[float]] = {}
        self.ceilings: dict[tuple[int, str], deque[float]] = {}
        self.current: dict[int, Strategy] = {}
        self.decisions = 0

    def bucket(self, batch: int) -> int:
        """Index of the bucket that holds `batch` (at least 1)."""
        return bisect.bisect_right(self.config.thresholds, batch) - 1

    def estimate(self, bucket: int, strategy: Strategy) -> float | None:
        """Median reward, the prior where nothing was measured, None where neither is known."""
        key = (bucket, str(strategy))
        seen = self.rewards.get(key)
        return statistics.median(seen) if seen else self.prior.get(key)

    def select(self, batch: int, context: StepContext = NO_CONTEXT) -> Strategy:
        bucket = self.bucket(batch)
        arms = self.arms[bucket]
        self.decisions += 1
        if len(arms) == 1:
            return arms[0]
        for arm in arms:  # first trials, for long enough that one slow step does not decide
            seen = len(self.rewards.get((bucket, str(arm)), ()))
            untried = seen < self.config.warmup and (seen or (bucket, str(arm)) not in self.prior)
            if untried and not self._beaten(bucket, arm):
                return arm
        estimates = {arm: self.estimate(bucket, arm) for arm in arms}
        best = max(arms, key=lambda arm: estimates[arm])
        current = self.current.get(bucket, best)
        if estimates[best] > estimates[current] * (1 + self.config.margin):
            current = best
        self.current[bucket] = current
        return self._explore(bucket, estimates, current) or current

    def _beaten(self, bucket: int, arm: Strategy) -> bool:
        """Whether another arm brings more than this one would if all its drafts were accepted."""
        ceilings = self.ceilings.get((bucket, str(arm)), ())
        if len(ceilings) < 2:
            return False
        others = (self.estimate(bucket, other) for other in self.arms[bucket] if other != arm)
        return max(ceilings) < max((x for x in others if x is not None), default=0.0)

    def _explore(self, bucket: int, estimates: dict, current: Strategy) -> Strategy | None:
        rng = random.Random(f"{self.config.seed}:{self.decisions}")
        if rng.random() >= self.config.epsilon:
            return None
        arm = rng.choice([a for a in estimates if a != current])
        hopeless = estimates[arm] < self.config.hopeless * estimates[current]
        hopeless = hopeless or self._beaten(bucket, arm)
        return None if hopeless and rng.random() >= 0.1 else arm

    def record(self, strategy: Strategy, *, batch: int, tokens: int, seconds: float) -> None:
        key, most = (self.bucket(batch), str(strategy)), batch * (1 + strategy.num_steps)
        for windows, reward in ((self.rewards, tokens), (self.ceilings, most)):
            window = windows.setdefault(key, deque(maxlen=self.config.window))
            window.append(reward / max(seconds, 1e-9))

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers: may be written as JSON."""
        return {
            "decisions": self.decisions,
            "rewards": [[bucket, name, list(r)] for (bucket, name), r in self.rewards.items()],
            "ceilings": [[bucket, name, list(r)] for (bucket, name), r in self.ceilings.items()],
            "current": [[bucket, str(arm)] for bucket, arm in self.current.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; arms that no longer exist are dropped."""
        self.decisions = state["decisions"]
        known = {(i, str(arm)): arm for i, arms in enumerate(self.arms) for arm in arms}
        self.rewards, self.ceilings = (
            {
                (bucket, name): deque(values, maxlen=self.config.window)
                for bucket, name, values in state[kind]
                if (bucket, name) in known
            }
            for kind in ("rewards", "ceilings")
        )
        self.current = {b: known[b, name] for b, name in state["current"] if (b, name) in known}


def forget_arms(state: Mapping[str, Any], drafters: Collection[str]) -> dict[str, Any]:
    """A bandit's `state_dict` without what it measured of these drafters: they are tried anew."""
    kept = {
        kind: [entry for entry in state[kind] if entry[1].split("_")[0] not in drafters]
        for kind in ("rewards", "ceilings")
    }
    return {**state, **kept}
