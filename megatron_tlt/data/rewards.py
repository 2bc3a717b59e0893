"""Rewards: which function scores a response, and the plain ones; runs in workers, so imports nothing heavy.

A reward is a function (data_source, solution_str, ground_truth, extra_info) -> number or {"score": number},
the signature that verl's users write. It is named in `REWARDS` or by import path "package.module:function".
It returns how right the answer is; when it cannot tell, it raises, which counts as a verifier error and not
as a wrong answer. Model text is data: nothing here or below evaluates it.
"""

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

RewardFunction = Callable[..., float | Mapping[str, float]]

# What each name stands for. Modules with heavy dependencies are imported where the reward runs.
REWARDS = {
    "exact": "megatron_tlt.data.rewards:exact_match",
    "countdown": "megatron_tlt.data.countdown:countdown_reward",
    "gsm8k": "megatron_tlt.data.math_reward:gsm8k_reward",
    "math": "megatron_tlt.data.math_reward:math_reward",
    "reasoning_gym": "megatron_tlt.data.reasoning:reasoning_reward",
}
# These can neither hang nor crash on any text, so they may run in the caller's own process.
INLINE_REWARDS = frozenset({"exact", "countdown"})


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """Which reward, and how its workers are held."""

    reward: str = "exact"
    """For prompts that name none: exact, countdown, gsm8k, math, reasoning_gym, or package.module:function
    with verl's signature (data_source, solution_str, ground_truth, extra_info)."""
    by_source: dict[str, str] = field(default_factory=dict)
    """Reward by data_source, before `reward`; a row's own reward comes first."""
    format_pattern: str = ""
    """Regular expression that a well-formed response matches as a whole (. matches line breaks)."""
    format_coef: float = 0.0
    """Added to the score of a response that matches format_pattern."""
    num_workers: int = 1
    """Worker processes a rank; 0: in the rank itself, for exact and countdown only."""
    timeout_s: float = 5.0
    """Wall-clock limit of one verdict; the worker is killed and replaced."""
    memory_limit_mb: int = 2048
    """Address space of a worker."""
    max_error_rate: float = 0.1
    """The run stops when a larger share of a step's verdicts are verifier errors."""

    def __post_init__(self) -> None:
        for name, good, need in (
            ("num_workers", self.num_workers >= 0, ">= 0"),
            ("timeout_s", self.timeout_s > 0, "> 0"),
            ("memory_limit_mb", self.memory_limit_mb >= 256, ">= 256"),
            ("max_error_rate", 0 <= self.max_error_rate <= 1, "in [0, 1]"),
            ("format_coef", self.format_coef >= 0, ">= 0"),
        ):
            if not good:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: it must be {need}")
        if (self.format_coef > 0) != bool(self.format_pattern):
            raise ValueError(
                f"format_coef {self.format_coef} and format_pattern {self.format_pattern!r} go together"
            )
        try:
            re.compile(self.format_pattern)
        except re.error as error:
            raise ValueError(f"format_pattern {self.format_pattern!r}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRequest:
    """One response to score. Example: RewardRequest(reward="exact", response="8", label="8")."""

    reward: str
    response: str
    label: str
    data_source: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """A verdict, or why there is none. Example: RewardResult(score=1.1, verdict=1.0)."""

    score: float = 0.0
    """What the policy is trained on: verdict plus format reward."""
    verdict: float = 0.0
    """The reward function's own number, for accuracy and pass@k."""
    error: str = ""
    """Verifier error; score and verdict are then meaningless and the response does not count."""


class VerifierError(RuntimeError):
    """Too many rewards could not be computed."""


def choose_reward(config: RewardConfig, *, own: str, data_source: str) -> str:
    """Name of a row's reward: its own, else its source's, else the configuration's."""
    return own or config.by_source.get(data_source) or config.reward


def resolve_reward(name: str) -> RewardFunction:
    """The function behind a name or import path. Raises ValueError saying what is missing."""
    path = REWARDS.get(name, name)
    module, _, function = path.partition(":")
    if not module or not function:
        raise ValueError(
            f"reward {name!r} is none of {', '.join(REWARDS)} and no import path package.module:function"
        )
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"reward {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"reward {name!r}: module {module} has no function {function!r}")
    return found


def score_response(
    function: RewardFunction, request: RewardRequest, *, format_pattern: str, format_coef: float
) -> RewardResult:
    """Score one response; what the function raises passes through to the caller."""
    answer = function(
        data_source=request.data_source,
        solution_str=request.response,
        ground_truth=request.label,
        extra_info=dict(request.metadata),
    )
    verdict = float(answer["score"] if isinstance(answer, Mapping) else answer)
    if not math.isfinite(verdict):
        raise ValueError(f"reward {request.reward!r} returned {verdict}")
    bonus = 0.0
    if format_coef > 0 and re.fullmatch(format_pattern, request.response, re.DOTALL):
        bonus = format_coef
    return RewardResult(score=verdict + bonus, verdict=verdict)


def check_error_rate(
    num_errors: int, num_results: int, *, max_error_rate: float, examples: Sequence[str] = ()
) -> None:
    """Raises VerifierError with the first reasons when more than `max_error_rate` of the verdicts failed."""
    if num_errors > max_error_rate * num_results:
        raise VerifierError(
            f"{num_errors} of {num_results} rewards could not be computed, more than max_error_rate "
            f"{max_error_rate}; for example: {'; '.join(dict.fromkeys(examples[:3])) or 'no reason given'}"
        )


def exact_match(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object]
) -> float:
    """1.0 when the response, or its last <answer>..</answer>, equals the label up to outer white space."""
    return float(extract_answer(solution_str) == ground_truth.strip())


def tagged_answer(text: str) -> str | None:
    """What stands in the last complete <answer>..</answer>, stripped; None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def extract_answer(text: str) -> str:
    """What stands in the last complete <answer>..</answer>, else the whole text; stripped."""
    found = tagged_answer(text)
    return text.strip() if found is None else found
