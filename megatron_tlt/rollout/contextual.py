"""A contextual bandit: what a step costs and what it brings are learned apart.

BEG-MAB (`rollout.tuner`) knows one number a bucket and arm, so what it learns at batch 1 says nothing
about batch 8, and a change of the text looks like noise. Here tokens/s of an arm is predicted as

    batch * min(1 + gain(arm) * sum_j rate^j, remaining) / seconds(arm, batch)

with the running requests' acceptance `rate` and tokens `remaining` from the step's context; `gain`, one
number an arm over all batch sizes, and the correction of the measured cost table are medians over a
sliding window. A new version of the trained drafter makes its arms' gains unknown again. Margin and
exploration as in BEG-MAB.
"""

import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_tlt.rollout.costs import CostTable
from megatron_tlt.rollout.tuner import NO_CONTEXT, StepContext, TunerConfig
from megatron_tlt.types import OFF, Strategy

_TRAINED = ("eagle", "hybrid")


class ContextualTuner:
    """`StrategyPolicy` over `strategies`; `costs` must know each of them (see `CostTable`).

    Example: ContextualTuner([OFF, NGRAM], costs). `TunerConfig.thresholds` plays no role here.
    """

    def __init__(
        self, strategies: Sequence[Strategy], costs: CostTable, config: TunerConfig | None = None
    ) -> None:
        if not strategies:
            raise ValueError("no strategies to choose from: give at least one")
        for strategy in strategies:
            costs.seconds(str(strategy), 1)
        self.strategies, self.costs = list(strategies), costs
        self.config = config or TunerConfig()
        self.gains: dict[str, deque[float]] = {}
        self.ratios: dict[str, deque[float]] = {}
        self.current: Strategy | None = None
        self.decisions = self.draft_version = 0
        self._context = NO_CONTEXT

    def predict(self, strategy: Strategy, batch: int, context: StepContext) -> float:
        """Tokens/s that the strategy should bring."""
        seen = self.ratios.get(str(strategy))
        seconds = self.costs.seconds(str(strategy), batch) * (statistics.median(seen) if seen else 1)
        tokens = 1.0
        if strategy != OFF:
            tokens += self._gain(strategy) * _chain(context.accept_rate, strategy)
        return batch * min(tokens, max(context.remaining, 1.0)) / seconds

    def _gain(self, strategy: Strategy) -> float:
        """1 before anything is known: the arm is taken at the requests' own acceptance rate."""
        seen = self.gains.get(str(strategy))
        return statistics.fmean(seen) if seen else 1.0

    def select(self, batch: int, context: StepContext = NO_CONTEXT) -> Strategy:
        self.decisions += 1
        self._context = context
        if context.draft_version != self.draft_version:
            self.draft_version = context.draft_version
            self.gains = {n: g for n, g in self.gains.items() if not n.startswith(_TRAINED)}
        for arm in self.strategies:  # first trials, if the prediction gives the arm a chance
            if len(self.gains.get(str(arm), ())) < self.config.warmup and self._hopeful(
                arm, batch, context
            ):
                return arm
        predicted = {arm: self.predict(arm, batch, context) for arm in self.strategies}
        best = max(self.strategies, key=lambda arm: predicted[arm])
        current = self.current if self.current in predicted else best
        if predicted[best] > predicted[current] * (1 + self.config.margin):
            current = best
        self.current = current
        return self._explore(predicted, current)

    def _hopeful(self, arm: Strategy, batch: int, context: StepContext) -> bool:
        best = max(self.predict(other, batch, context) for other in self.strategies)
        return self.predict(arm, batch, context) >= self.config.hopeless * best

    def _explore(self, predicted: Mapping[Strategy, float], current: Strategy) -> Strategy:
        rng = random.Random(f"{self.config.seed}:{self.decisions}")
        others = [arm for arm in self.strategies if arm != current]
        if not others or rng.random() >= self.config.epsilon:
            return current
        arm = rng.choice(others)
        hopeless = predicted[arm] < self.config.hopeless * predicted[current]
        return current if hopeless and rng.random() >= 0.1 else arm

    def record(self, strategy: Strategy, *, batch: int, tokens: int, seconds: float) -> None:
        name = str(strategy)
        expected = self.costs.seconds(name, batch)
        self._window(self.ratios, name).append(seconds / expected)
        drafted = 0.0 if strategy == OFF else _chain(self._context.accept_rate, strategy)
        gain = (tokens / batch - 1) / drafted if drafted > 0 else 0.0
        self._window(self.gains, name).append(gain)

    def _window(self, windows: dict[str, deque[float]], name: str) -> deque[float]:
        return windows.setdefault(name, deque(maxlen=self.config.window))

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers: may be written as JSON."""
        return {
            "decisions": self.decisions,
            "draft_version": self.draft_version,
            "gains": {name: list(values) for name, values in self.gains.items()},
            "ratios": {name: list(values) for name, values in self.ratios.items()},
            "current": None if self.current is None else str(self.current),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; arms that no longer exist are dropped."""
        known = {str(arm): arm for arm in self.strategies}
        self.decisions, self.draft_version = state["decisions"], state["draft_version"]
        for name in ("gains", "ratios"):
            windows = {
                arm: deque(values, maxlen=self.config.window)
                for arm, values in state[name].items()
                if arm in known
            }
            setattr(self, name, windows)
        self.current = known.get(state["current"])


def _chain(rate: float, strategy: Strategy) -> float:
    """Accepted drafts of a chain whose every token survives with `rate`."""
    return sum(rate**j for j in range(1, strategy.num_steps + 1))
