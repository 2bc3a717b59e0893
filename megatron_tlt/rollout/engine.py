"""What the RL loop sees of a rollout engine: tokens in, tokens out."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import torch

from megatron_tlt.types import EngineStats, FeatureSample, Prompt, Rollout, SamplingParams

Weights = Literal["target", "draft"]


class RolloutEngine(Protocol):
    """One engine. It is driven by its caller: nothing runs between calls.

    Example: engine.submit(prompts, params, step=3); for rollout in engine.stream(): ...
    """

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0) -> None:
        """Queue `params.n` samples of each prompt. `step` is part of their random seeds.

        Raises ValueError where prompt and max_tokens do not fit into the engine's context.
        """

    def stream(self) -> Iterator[Rollout]:
        """Run, and yield responses as they finish, until nothing is left or `pause` was called."""

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0
    ) -> list[Rollout]:
        """`submit` and `stream` to the end; ordered by prompt as given, then by sample."""

    def update_weights(
        self, which: Weights, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Load (Hugging Face name, tensor) pairs; tokens from now on carry `version`.

        Between two responses of `stream` this is allowed: the cache of running responses stays.
        """

    def pause(self) -> None:
        """End `stream` before its next step; requests keep their state."""

    def resume(self) -> None:
        """Let `stream` run again."""

    def abort(self, prompt_ids: Iterable[int] | None = None) -> list[Rollout]:
        """End these prompts' responses (default: all); started ones come back with what they have."""

    def capture_features(self, max_rows: int) -> None:
        """Keep the target's final hidden state of each emitted token, at most `max_rows`; 0 stops."""

    def take_features(self) -> list[FeatureSample]:
        """Hand over the captured features of finished responses, and forget them."""

    def stats(self) -> EngineStats:
        """Counters since the start, and the newest step records."""
