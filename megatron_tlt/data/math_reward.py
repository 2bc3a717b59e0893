"""Mathematical equality of answers by math-verify, the only importer of the library.

Its own time limits use SIGALRM, which fails off the main thread, where a caught exception would make every
score 0; they are switched off, and the worker process is killed by the wall clock instead. What the library
evaluates outside LaTeX it has first cut down to digits and operators, so text can cost time and memory, both
bounded, but not run code.
"""

import logging
from collections.abc import Mapping

from math_verify import parse, verify

# It warns at every call that its limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object]
) -> float:
    """1.0 if the last answer in the response equals the label, as mathematics (1/2 = 0.5), else 0.0.

    Raises ValueError for a label that cannot be read: a fault of the data, not a wrong answer.
    """
    label = ground_truth if "\\boxed" in ground_truth or "$" in ground_truth else f"${ground_truth}$"
    gold = parse(label, parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"label {ground_truth!r} holds no answer that math-verify can read")
    answer = parse(solution_str, parsing_timeout=None, raise_on_error=True)
    return float(verify(gold, answer, timeout_seconds=None, raise_on_error=True))


def gsm8k_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object]
) -> float:
    """As `math_reward`; a final "#### number" in response or label is what counts."""
    return math_reward(
        data_source,
        solution_str.rsplit("####", 1)[-1].strip(),
        ground_truth.rsplit("####", 1)[-1].strip().replace(",", ""),
        extra_info,
    )
