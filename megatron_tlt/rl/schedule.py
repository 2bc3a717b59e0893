"""Which engine generates which prompt: a static split, or a queue from which engines pull.

Prompts go long first: the longest responses should not be the last to start. Both ways hand out every prompt
exactly once; what an engine makes of a prompt does not depend on who takes it.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_tlt.parallel import Parallel
from megatron_tlt.rollout.engine import RolloutEngine
from megatron_tlt.types import Prompt, Rollout, SamplingParams

import torch.distributed as dist


class LengthPredictor:
    """Expected response length of a prompt: what its own responses had, else what all had.

    Example: predictor.observe(rollouts); predictor.order(prompts) -> longest expected first.
    """

    def __init__(self, *, decay: float = 0.5) -> None:
        self._decay = decay
        self._lengths: dict[int, float] = {}

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Learn the mean length of each prompt's responses; older steps fade by `decay`."""
        sums: dict[int, list[int]] = {}
        for rollout in rollouts:
            sums.setdefault(rollout.prompt_id, []).append(len(rollout.tokens))
        for prompt_id, lengths in sums.items():
            new = sum(lengths) / len(lengths)
            old = self._lengths.get(prompt_id, new)
            self._lengths[prompt_id] = self._decay * old + (1 - self._decay) * new

    def order(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Longest expected first; among unknown ones the longest prompt, then the smallest number."""
        known = self._lengths
        typical = sum(known.values()) / len(known) if known else 0.0
        return sorted(
            prompts,
            key=lambda p: (-known.get(p.prompt_id, typical), -len(p.tokens), p.prompt_id),
        )

    def state_dict(self) -> dict[str, float]:
        """Plain: may be written as JSON."""
        return {str(prompt_id): length for prompt_id, length in self._lengths.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._lengths = {int(prompt_id): length for prompt_id, length in state.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """This rank's engine among all of them. Example: rank 3 of TP2 x DP2 is in replica 1 of 2.

    With PP every stage's ranks run an engine of the whole model, so there are world / TP of them.
    """

    index: int
    count: int

    @staticmethod
    def of(parallel: Parallel) -> "Replica":
        pp = parallel.config.pipeline_model_parallel_size
        return Replica(
            index=parallel.dp_rank * pp + parallel.pp_rank, count=parallel.dp_size * pp
        )


class PromptFeed(Protocol):
    """Hands this engine its next prompts."""

    def take(self) -> Prompt | None:
        """The next prompt, or None when there are no more; alike on the ranks of a TP group."""


class StaticFeed:
    """Dealt out like cards, back and forth, so that every engine gets long and short ones."""

    def __init__(self, prompts: Sequence[Prompt], replica: Replica) -> None:
        index, count = replica.index, replica.count
        mine = (
            prompt
            for place, prompt in enumerate(prompts)
            if (place % count if place // count % 2 == 0 else count - 1 - place % count) == index
        )
        self._prompts = iter(mine)

    def take(self) -> Prompt | None:
        return next(self._prompts, None)


class SharedFeed:
    """A counter in the process group's store: whoever has room takes the next prompt.

    The first TP rank counts and tells the others. `name` must be new for every list of prompts.
    """

    def __init__(
        self, prompts: Sequence[Prompt], store: dist.Store, name: str, *, tp_group: dist.ProcessGroup
    ) -> None:
        self._prompts, self._store, self._name, self._group = prompts, store, name, tp_group

    def take(self) -> Prompt | None:
        place = [0]
        if self._group.rank() == 0:
            place = [self._store.add(self._name, 1) - 1]
        if self._group.size() > 1:
            dist.broadcast_object_list(place, group=self._group, group_src=0)
        return self._prompts[place[0]] if place[0] < len(self._prompts) else None


def name_of_run() -> str:
    """A new name, the same on all ranks, for keys in the store; collective over the world.

    A store outlives a run in it, and a resumed run repeats step numbers: the name must not.
    """
    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, src=0)
    return name[0]


class FeedMaker:
    """Makes the feed of each generation; `shared` chooses the queue. Collective when it is made."""

    def __init__(self, parallel: Parallel, store: dist.Store | None) -> None:
        self._parallel, self._store = parallel, store
        self._name, self._made = name_of_run(), 0

    def __call__(self, prompts: Sequence[Prompt]) -> PromptFeed:
        """Every rank calls it with the same prompts, equally often."""
        self._made += 1
        if self._store is None:
            return StaticFeed(prompts, Replica.of(self._parallel))
        name = f"prompts/{self._name}/{self._made}"
        return SharedFeed(prompts, self._store, name, tp_group=self._parallel.groups.tp)


def fair_slots(slots: int, num_prompts: int, n: int, replica: Replica) -> int:
    """Responses that an engine has under way: `slots`, but no more than its share of `num_prompts` times `n`.

    Without the share the first of several engines would empty a shared queue that fits into its slots.
    """
    return min(slots, -(-num_prompts // replica.count) * n)


def generate_from(
    engine: RolloutEngine,
    feed: PromptFeed,
    params: SamplingParams,
    *,
    step: int,
    slots: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Rollout]:
    """Responses as they finish. Another prompt is taken whenever fewer than `slots` are under way.

    Once `stopped` says so after a response, what is under way is aborted and nothing more comes.
    """
    under_way, more = 0, True

    def fill() -> None:
        nonlocal under_way, more
        while more and under_way < slots:
            prompt = feed.take()
            more = prompt is not None
            if more:
                engine.submit([prompt], params, step=step)
                under_way += params.n

    fill()
    while under_way:
        before = under_way
        for rollout in engine.stream():
            under_way -= 1
            fill()
            yield rollout
            if stopped():
                engine.abort()
                return
        assert under_way < before, "the engine stopped with responses under way"


def gather_everywhere(mine: list[Any], parallel: Parallel) -> list[Any]:
    """The items of all engines on every rank, engine after engine; TP ranks have the same and count once."""
    everyone: list = [None] * parallel.world_size
    dist.all_gather_object(everyone, mine if parallel.tp_rank == 0 else [])
    return [item for items in everyone for item in items]
