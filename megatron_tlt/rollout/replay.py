"""Replay a trace under any policy with a measured clock: one engine, or a cluster of them. Pure simulation.

All policies see identical tokens, so their times compare without noise. What is simulated is the decode
loop of the native engine: free slots are filled (each prompt's prefill costs its tokens once a group and
engine), then all running responses take one step whose cost the table gives for (strategy, running batch).
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_tlt.rollout.costs import CostTable
from megatron_tlt.rollout.trace import TraceResponse
from megatron_tlt.rollout.tuner import NO_CONTEXT, StepContext, StrategyPolicy
from megatron_tlt.types import OFF, Strategy


@dataclass(slots=True)
class ReplayResult:
    """Seconds are those of the simulated clock."""

    seconds: float
    """Until the last engine was done."""
    tokens: int
    steps: int
    rank_seconds: list[float]
    """When each engine was done."""
    strategy_steps: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bubble(self) -> float:
        """Share of the engines' time that is spent waiting for the slowest."""
        return 1 - sum(self.rank_seconds) / (len(self.rank_seconds) * self.seconds)


@dataclass(slots=True)
class OraclePolicy:
    """Knows the trace: takes the strategy with the most tokens/s of this very step."""

    strategies: Sequence[Strategy]
    costs: CostTable
    running: list["_Running"] = field(default_factory=list)

    def select(self, batch: int, context: StepContext = NO_CONTEXT) -> Strategy:
        def speed(strategy: Strategy) -> float:
            tokens = sum(request.gain(strategy) for request in self.running)
            return tokens / self.costs.seconds(str(strategy), batch)

        return max(self.strategies, key=speed)

    def record(self, strategy: Strategy, *, batch: int, tokens: int, seconds: float) -> None:
        """There is nothing that it does not know."""


@dataclass(slots=True)
class _Running:
    response: TraceResponse
    position: int = 1  # the first token comes with the prefill
    rate: float = 0.7

    def gain(self, strategy: Strategy) -> int:
        """Tokens that a step under `strategy` brings here."""
        left = self.response.tokens - self.position
        if strategy == OFF:
            return min(1, left)
        return min(1 + self.response.accepts[str(strategy)][self.position], left)


class _Engine:
    """One rank: its clock, its policy, its running responses."""

    def __init__(
        self, policy: StrategyPolicy, costs: CostTable, queue: deque[TraceResponse], *, max_batch: int,
        draft_version: int,
    ) -> None:  # fmt: skip
        self.policy, self.costs, self.queue, self.max_batch = policy, costs, queue, max_batch
        self.draft_version = draft_version
        self.clock, self.steps, self.used = 0.0, 0, Counter()
        self.running: list[_Running] = []
        self.prefilled: set[int] = set()

    def step(self) -> bool:
        """Admit and decode once; False when nothing is left."""
        while self.queue and len(self.running) < self.max_batch:
            response = self.queue.popleft()
            if response.prompt_id not in self.prefilled:
                self.prefilled.add(response.prompt_id)
                self.clock += self.costs.prefill_token * response.prompt_tokens
            self.running.append(_Running(response))
        self.running = [r for r in self.running if r.position < r.response.tokens]
        if not self.running:
            return bool(self.queue)
        batch = len(self.running)
        if isinstance(self.policy, OraclePolicy):
            self.policy.running = self.running
        strategy = self.policy.select(batch, self._context())
        gains = [request.gain(strategy) for request in self.running]
        for request, gain in zip(self.running, gains, strict=True):
            request.position += gain
            if strategy != OFF:
                rate = (gain - 1) / min(strategy.num_steps, gain)
                request.rate += 0.2 * (rate - request.rate)
        seconds = self.costs.seconds(str(strategy), batch)
        self.clock += seconds
        self.steps += 1
        self.used[str(strategy)] += 1
        self.policy.record(strategy, batch=batch, tokens=sum(gains), seconds=seconds)
        return True

    def _context(self) -> StepContext:
        count = len(self.running)
        return StepContext(
            accept_rate=sum(r.rate for r in self.running) / count,
            remaining=sum(r.response.tokens - r.position for r in self.running) / count,
            draft_version=self.draft_version,
        )


def replay(
    trace: Sequence[TraceResponse],
    make_policy: Callable[[], StrategyPolicy],
    costs: CostTable,
    *,
    max_batch: int,
    ranks: int = 1,
    sharing: Literal["static", "queue"] = "static",
    draft_version: int = 0,
) -> ReplayResult:
    """Simulated rollout of the whole trace; every rank has a policy of its own, told of `draft_version`.

    `sharing`: "static" deals prompts (whole groups) out in turn before the start; with "queue" the ranks take
    responses from one queue as they have room, none having more than its share under way. Raises ValueError
    for a trace without responses.
    """
    if not trace or ranks < 1 or max_batch < 1:
        raise ValueError(
            f"{len(trace)} responses, ranks={ranks}, max_batch={max_batch}: need at least one of each"
        )
    shared = deque(trace)
    queues, room = [shared] * ranks, min(max_batch, -(-len(trace) // ranks))
    if sharing == "static":
        prompts = {p: i for i, p in enumerate(dict.fromkeys(r.prompt_id for r in trace))}
        room = max_batch
        queues = [
            deque(r for r in trace if prompts[r.prompt_id] % ranks == rank) for rank in range(ranks)
        ]
    engines = [
        _Engine(make_policy(), costs, queue, max_batch=room, draft_version=draft_version)
        for queue in queues
    ]
    order = [(0.0, rank) for rank in range(ranks)]
    while order:  # always the engine whose clock is behind
        _, rank = heapq.heappop(order)
        if engines[rank].step():
            heapq.heappush(order, (engines[rank].clock, rank))
    clocks = [engine.clock for engine in engines]
    used: Counter[str] = sum((engine.used for engine in engines), Counter())
    return ReplayResult(
        max(clocks), sum(r.tokens for r in trace), sum(e.steps for e in engines), clocks, dict(used)
    )
