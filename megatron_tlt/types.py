"""Frozen records that cross a border between engine, trainer, drafter and rewards.

Token-in, token-out: a record carries token ids; text exists only at the rewards. Tensors appear in
feature records alone, and the module itself imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class FinishReason(str, Enum):
    """Why a response ended."""

    STOP = "stop"  # a stop token or stop string came out
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the caller ended it; what was generated so far is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt. Example: Prompt(prompt_id=7, tokens=(1, 42, 9))."""

    prompt_id: int
    """Stable number of the prompt in its data set: part of the random seed of its samples."""
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(
                f"prompt {self.prompt_id} has no tokens: give it at least one (such as BOS)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Example: SamplingParams(n=8, temperature=1.0, max_tokens=512).

    Order of operations: repetition penalty, temperature, top-k, top-p, min-p. Log-probs are those of the
    target at this temperature over the whole vocabulary, before penalty and truncation, because that is
    what a trainer recomputes; at temperature 0 (greedy) they are those of temperature 1.
    """

    n: int = 1
    """Samples per prompt; the prompt is prefilled once for all of them."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this mass."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt and response."""
    max_tokens: int = 256
    """Longest response, in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response; the stop token is part of it."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the token that completes one is the last."""
    seed: int = 0
    """Root of all random numbers; combined with step, prompt and sample."""

    def __post_init__(self) -> None:
        for name, good in (
            ("n", self.n >= 1),
            ("temperature", self.temperature >= 0),
            ("top_k", self.top_k >= 0),
            ("top_p", 0 < self.top_p <= 1),
            ("min_p", 0 <= self.min_p <= 1),
            ("repetition_penalty", self.repetition_penalty > 0),
            ("max_tokens", self.max_tokens >= 1),
        ):
            if not good:
                raise ValueError(
                    f"{name}={getattr(self, name)} is out of range: need n >= 1, temperature >= 0, "
                    "top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, repetition_penalty > 0, max_tokens >= 1"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One finished response. `tokens`, `log_probs` and `weight_versions` have one entry a token.

    Example: Rollout(prompt_id=7, sample_index=0, prompt_tokens=(1, 42), tokens=(5, 2), log_probs=(-0.1,
    -0.7), weight_versions=(3, 3), finish_reason=FinishReason.STOP, verify_ct=1, num_drafted=3,
    num_accepted=1).
    """

    prompt_id: int
    sample_index: int
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """The target's, at the sampling temperature (see `SamplingParams`); never the drafter's."""
    weight_versions: tuple[int, ...]
    """Version of the target weights that emitted each token."""
    finish_reason: FinishReason
    verify_ct: int = 0
    """Speculative target forwards this response took part in."""
    num_drafted: int = 0
    """Draft tokens offered to the target."""
    num_accepted: int = 0
    """Draft tokens accepted, bonus tokens not counted."""
    step_tokens: tuple[int, ...] = ()
    """Tokens that each engine step gave, the prefill's first token (1) included; their sum is the length."""

    @property
    def accept_length(self) -> float:
        """Tokens per speculative forward, bonus token included: 1.0 is the floor; 0 without speculation."""
        return (self.num_accepted + self.verify_ct) / self.verify_ct if self.verify_ct else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How to speculate in one step. Example: Strategy(drafter="ngram", num_steps=6, num_draft_tokens=7).

    Names as in SGLang: a draft tree has `num_steps` levels, `topk` branches a node, and at most
    `num_draft_tokens` nodes are verified, the last emitted token (root) included.
    """

    drafter: str = "off"
    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1

    def __post_init__(self) -> None:
        good = self.num_steps == 0 and self.num_draft_tokens == 1
        if self.drafter != "off":
            good = self.num_steps >= 1 and self.topk >= 1 and self.num_draft_tokens >= 2
        if not good:
            raise ValueError(
                f"strategy {self} is impossible: 'off' takes num_steps=0, num_draft_tokens=1; "
                "a drafter needs num_steps >= 1, topk >= 1 and num_draft_tokens >= 2 (root included)"
            )

    def __str__(self) -> str:
        parts = (self.num_steps, self.topk, self.num_draft_tokens)
        return self.drafter + "".join(f"_{x}" for x in parts) * (self.drafter != "off")


OFF = Strategy()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one engine step did. `accepted_by_position[i]`: requests whose draft token i was accepted."""

    batch: int
    """Requests that decoded."""
    strategy: Strategy
    tokens: int
    """Tokens emitted."""
    drafted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    prefill_tokens: int = 0
    target_ms: float = 0.0
    draft_ms: float = 0.0
    other_ms: float = 0.0
    """All the rest, the prefill before the step included."""
    prefill_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counters since the engine started; acceptance counts speculated steps only, bonus included."""

    steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    speculated_tokens: int = 0
    """Tokens that speculated steps emitted."""
    verify_ct: int = 0
    """Requests times speculated steps."""
    drafted: int = 0
    preemptions: int = 0
    aborted: int = 0
    recent: tuple[StepRecord, ...] = field(default=())
    """The newest step records, oldest first (bounded)."""

    @property
    def accept_length(self) -> float:
        """Token-weighted tokens per request and speculated step, bonus included; 0 if none."""
        return self.speculated_tokens / self.verify_ct if self.verify_ct else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSample:
    """Hidden states of one response for drafter training.

    `hidden[i]` is the target's state at the position whose next token is `tokens[i]`, so a drafter of the
    EAGLE kind learns from (embedding of `tokens[i]`, `hidden[i]`) to `hidden[i + 1]`. With a captured
    context the rows of the prompt come first (see `context_tokens`).
    """

    prompt_id: int
    sample_index: int
    tokens: tuple[int, ...]
    hidden: torch.Tensor
    """`[c + t, f]`, c context and t response tokens, f = captured layers times hidden size."""
    weight_version: int
    """Version under which all these rows were computed."""
    context_tokens: tuple[int, ...] = ()
    """Last tokens of the prompt; their rows come before those of `tokens` in `hidden` (and `last_hidden`),
    so `hidden[i]` belongs to `(context_tokens + tokens)[i]`."""
    last_hidden: torch.Tensor | None = None
    """`[c + t, h]`, final states where `hidden` holds inner layers (EAGLE-3's teacher); None: `hidden` is
    them."""
