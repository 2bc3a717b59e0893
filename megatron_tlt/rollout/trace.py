"""Traces of rollouts: how long each response was, and what each strategy would have got accepted where.

One JSON line a response. `accepts[strategy][p]` is the number of drafts accepted if the strategy
speculated when p tokens were out. It is known where the recorded run stood; in between it follows from the
step that passed over: a draft from p + i of a step that took n tokens at p would have seen the same n - 1
- i tokens accepted. Where all drafts of that step were accepted, the next step's count continues the chain.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.files import write_text
from megatron_tlt.types import Rollout, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResponse:
    """Example: TraceResponse(prompt_id=7, sample_index=0, prompt_tokens=12, tokens=3,
    accepts={"ngram_4_1_5": (0, 1, 0)})."""

    prompt_id: int
    sample_index: int
    prompt_tokens: int
    tokens: int
    accepts: Mapping[str, tuple[int, ...]]


def accepted_at(step_tokens: Sequence[int], strategy: Strategy) -> tuple[int, ...]:
    """Accepted drafts at each position of a response that was decoded under `strategy` alone."""
    accepted: list[int] = [0] * sum(step_tokens)
    position = len(accepted)
    most = strategy.num_steps
    for n in reversed(step_tokens):
        position -= n
        after = accepted[position + n] if position + n < len(accepted) else 0
        goes_on = n - 1 >= most
        for i in range(n):
            known = n - 1 - i
            accepted[position + i] = min(most, known + (1 + after) * (goes_on and i > 0))
    return tuple(accepted)


def trace_of(runs: Mapping[Strategy, Sequence[Rollout]]) -> list[TraceResponse]:
    """One trace of the same responses under several strategies.

    Raises ValueError where a response's tokens differ between the runs.
    """
    first = next(iter(runs.values()))
    trace = []
    for index, rollout in enumerate(first):
        accepts = {}
        for strategy, rollouts in runs.items():
            other = rollouts[index]
            if other.tokens != rollout.tokens:
                raise ValueError(
                    f"prompt {rollout.prompt_id} sample {rollout.sample_index} has other tokens under "
                    f"{strategy}: record all strategies with one seed, in float32"
                )
            accepts[str(strategy)] = accepted_at(other.step_tokens, strategy)
        trace.append(
            TraceResponse(
                prompt_id=rollout.prompt_id, sample_index=rollout.sample_index,
                prompt_tokens=len(rollout.prompt_tokens), tokens=len(rollout.tokens), accepts=accepts,
            )
        )  # fmt: skip
    return trace


def write_trace(path: Path, trace: Iterable[TraceResponse]) -> None:
    lines = (
        json.dumps(
            {
                "prompt_id": r.prompt_id, "sample_index": r.sample_index,
                "prompt_tokens": r.prompt_tokens, "tokens": r.tokens, "accepts": dict(r.accepts),
            }
        )
        for r in trace
    )  # fmt: skip
    write_text(path, "\n".join(lines) + "\n")


def read_trace(path: Path) -> list[TraceResponse]:
    """Raises ValueError for a line that is no trace."""
    trace = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            value = json.loads(line)
            if not isinstance(value, dict) or set(value) != set(TraceResponse.__slots__):
                raise ValueError(f"{path} line {number} is no trace of a response")
            accepts = {name: tuple(counts) for name, counts in value.pop("accepts").items()}
            trace.append(TraceResponse(accepts=accepts, **value))
    return trace
