"""What the RL loop sees of a rollout engine: tokens in, tokens out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

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
        self, which: Weights, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int,
        checksum: str | None = None,
    ) -> None:  # fmt: skip
        """Load all (Hugging Face name, tensor) pairs or none; tokens from now on carry the target's
        `version`.

        Between two responses of `stream` this is allowed: the cache of running responses stays. Raises
        ValueError, with the old weights in force, for weights that are incomplete, of another model, or not
        those of `checksum` (`rollout.checksum.weights_checksum`).
        """

    def pause(self) -> None:
        """End `stream` before its next step; requests keep their state."""

    def resume(self) -> None:
        """Let `stream` run again."""

    def release_memory_occupation(self) -> None:
        """Give the key/value cache's memory to the training; weights stay and can be updated.

        Raises ValueError while requests are under way.
        """

    def resume_memory_occupation(self) -> None:
        """Take the memory back, before the next `submit`; nothing happens where it is held."""

    def abort(self, prompt_ids: Iterable[int] | None = None) -> list[Rollout]:
        """End these prompts' responses (default: all); started ones come back with what they have."""

    def capture_features(self, max_rows: int, *, context_rows: int = 0) -> None:
        """Keep the target's hidden state of each emitted token, at most `max_rows` rows; 0 stops.

        `context_rows`: rows of the prompt's last tokens that come along (a drafter attends to them).
        """

    def take_features(self) -> list[FeatureSample]:
        """Hand over the captured features of finished responses, and forget them."""

    def stats(self) -> EngineStats:
        """Counters since the start, and the newest step records."""

    def tuner_state(self) -> dict[str, Any]:
        """What the bandit that chooses strategies has learned (`BanditTuner.state_dict`); {} without one."""

    def load_tuner_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `tuner_state` at the next step; arms that this engine has not are dropped."""


def check_prompt(
    prompt: Prompt, params: SamplingParams, *, max_model_len: int, vocab_size: int
) -> None:
    """Raises ValueError, with the numbers, for a prompt that no engine of these sizes can take."""
    if len(prompt.tokens) + params.max_tokens > max_model_len:
        raise ValueError(
            f"prompt {prompt.prompt_id}: {len(prompt.tokens)} prompt tokens + max_tokens="
            f"{params.max_tokens} exceed max_model_len={max_model_len}: lower max_tokens or raise "
            "max_model_len"
        )
    if not 0 <= min(prompt.tokens) <= max(prompt.tokens) < vocab_size:
        raise ValueError(
            f"prompt {prompt.prompt_id} has tokens {min(prompt.tokens)} to {max(prompt.tokens)}, "
            f"outside the vocabulary of {vocab_size}"
        )


def generate_in_order(
    engine: RolloutEngine, prompts: Sequence[Prompt], params: SamplingParams, *, step: int
) -> list[Rollout]:
    """`RolloutEngine.generate` of an idle engine. Raises ValueError where two prompts share an id."""
    place = {prompt.prompt_id: i for i, prompt in enumerate(prompts)}
    if len(place) != len(prompts):
        raise ValueError("two prompts share a prompt_id: use SamplingParams.n for more samples")
    engine.submit(prompts, params, step=step)
    return sorted(engine.stream(), key=lambda r: (place[r.prompt_id], r.sample_index))
