"""reasoning-gym tasks, the only importer of the library: an answer is right at score 1.0, else wrong.

Its scorers give partial credit that a policy learns to harvest (a substring of the answer, or nothing that
can be read), so everything below 1.0 is 0. Data sets whose scorer evaluates text as Python are refused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from megatron_tlt.data.rewards import extract_answer

# Their scorers evaluate the answer, or text of the row, as Python (eval, exec, sympy's parse_expr).
UNSAFE = frozenset({
    "binary_matrix", "bitwise_arithmetic", "codeio", "countdown", "intermediate_integration", "n_queens",
    "number_sorting", "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
    "string_insertion",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningItem:
    """One problem. `metadata` holds what the scorer asks for, as JSON text under "entry"."""

    question: str
    answer: str
    metadata: dict[str, str]


def _library() -> ModuleType:
    try:
        import reasoning_gym  # three seconds, an optional dependency, and only here needed
    except ImportError as error:
        raise ValueError(
            f"reasoning-gym tasks need the package: pip install 'megatron_tlt[rewards]' ({error})"
        ) from error
    return reasoning_gym


def reasoning_items(
    name: str, *, size: int, seed: int, settings: Mapping[str, object]
) -> Iterator[ReasoningItem]:
    """Problems of data set `name`. Raises ValueError for an unknown or unsafe one, or wrong settings."""
    library = _library()
    _refuse_unsafe(name)
    known = library.factory.DATASETS
    if name not in known:
        raise ValueError(f"reasoning-gym has no data set {name!r}, only {', '.join(sorted(known))}")
    try:
        entries = library.create_dataset(name, size=size, seed=seed, **settings)
    except (TypeError, AssertionError) as error:  # how its configurations refuse
        raise ValueError(f"reasoning-gym {name} with {dict(settings)}: {error}") from error
    for entry in entries:
        facts = {"question": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
        yield ReasoningItem(
            question=entry["question"],
            answer=str(entry["answer"]),
            metadata={"name": name, "entry": json.dumps(facts, default=str)},
        )


def reasoning_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object]
) -> float:
    """1.0 if reasoning-gym gives the stripped answer its full score, else 0.0."""
    name = str(extra_info["name"])
    _refuse_unsafe(name)
    entry = json.loads(str(extra_info["entry"]))
    score = _library().get_score_answer_fn(name)(extract_answer(solution_str), entry)
    return float(score >= 1.0)


def _refuse_unsafe(name: str) -> None:
    if name in UNSAFE:
        raise ValueError(
            f"reasoning-gym's scorer of {name} evaluates text as Python: it is not run "
            "(for countdown, use the reward of that name)"
        )
