"""One SGLang engine for a tensor-parallel group of trainers: the first rank holds it and tells the others."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.rollout.acceptance import Counts
from megatron_tlt.rollout.engine import Weights
from megatron_tlt.rollout.sglang.engine import SglangEngine
from megatron_tlt.rollout.sglang.store import TargetTables
from megatron_tlt.types import EngineStats, FeatureSample, Prompt, Rollout, SamplingParams


class SharedEngine:
    """`RolloutEngine` over `group`, whose ranks make the same calls in the same order.

    `engine` is the first rank's, None elsewhere. Responses reach every rank as they finish. What only one
    rank can have (features, counters, the bandit's state) the first has, so that it is not counted twice; a
    drafter learns there alone. `tables`: of a rank without the engine. Raises ValueError where another rank
    than the first has an engine, or a rank has both or neither.
    """

    cuts_head = False

    def __init__(
        self, engine: SglangEngine | None, group: dist.ProcessGroup, *, tables: TargetTables | None = None
    ) -> None:
        if (engine is None) == (group.rank() == 0) or (engine is None) == (tables is None):
            raise ValueError("the first rank of the group has the engine, the others have tables")
        self.engine, self._group, self._tables = engine, group, tables
        self.version = 0

    def _hear(self, value: Any) -> Any:
        """The first rank's value, on all."""
        heard = [value]
        dist.broadcast_object_list(heard, group=self._group, group_src=0)
        return heard[0]

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0) -> None:
        if self.engine is not None:
            self.engine.submit(prompts, params, step=step)

    def stream(self) -> Iterator[Rollout]:
        mine = None if self.engine is None else self.engine.stream()
        while True:
            rollout = self._hear(None if mine is None else next(mine, None))
            if rollout is None:
                return
            yield rollout

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0
    ) -> list[Rollout]:
        mine = None if self.engine is None else self.engine.generate(prompts, params, step=step)
        return self._hear(mine)

    def abort(self, prompt_ids: Iterable[int] | None = None) -> list[Rollout]:
        return self._hear(None if self.engine is None else self.engine.abort(prompt_ids))

    def update_weights(
        self, which: Weights, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int,
        checksum: str | None = None,
    ) -> None:  # fmt: skip
        """Every rank takes all of `tensors`, whose making may be collective."""
        if self.engine is not None:
            self.engine.update_weights(which, tensors, version=version, checksum=checksum)
        else:
            for name, tensor in tensors:
                if which == "target":
                    self._tables.take(name, tensor)
        if which == "target":
            self.version = version

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As SglangEngine.tables, on every rank."""
        return (self._tables or self.engine.store.tables).pair()

    def take_acceptance(self) -> Counts:
        return {} if self.engine is None else self.engine.take_acceptance()

    def tuner_state(self) -> dict[str, Any]:
        return {} if self.engine is None else self.engine.tuner_state()

    def load_tuner_state(self, state: Mapping[str, Any]) -> None:
        if self.engine is not None:
            self.engine.load_tuner_state(state)

    def capture_features(self, max_rows: int, *, context_rows: int = 0) -> None:
        if self.engine is not None:
            self.engine.capture_features(max_rows, context_rows=context_rows)

    def take_features(self) -> list[FeatureSample]:
        return [] if self.engine is None else self.engine.take_features()

    def stats(self) -> EngineStats:
        return EngineStats() if self.engine is None else self.engine.stats()

    def pause(self) -> None:
        if self.engine is not None:
            self.engine.pause()

    def resume(self) -> None:
        if self.engine is not None:
            self.engine.resume()

    def release_memory_occupation(self) -> None:
        if self.engine is not None:
            self.engine.release_memory_occupation()

    def resume_memory_occupation(self) -> None:
        if self.engine is not None:
            self.engine.resume_memory_occupation()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
