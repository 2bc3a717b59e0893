"""The child process of `reward_workers`: reads requests as JSON lines, answers each with one line.

Started as `python -m megatron_tlt.data.reward_worker SETTINGS`. It imports nothing heavy of this project, so
it is up in the time that its rewards take to import. Standard output is kept for answers; what a reward
prints goes to standard error.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from dataclasses import asdict
from types import TracebackType

from megatron_tlt.data.rewards import RewardRequest, RewardResult, resolve_reward, score_response

_PR_SET_PDEATHSIG = 1


class _Border:
    """The edge of the process: what a reward raises leaves as text in the answer, a verifier error."""

    error = ""
    out_of_memory = False

    def __enter__(self) -> "_Border":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = f"{type(error).__name__}: {error}"[:500]
        self.out_of_memory = isinstance(error, MemoryError)
        return True


def _bind_to_parent(memory_limit_mb: int) -> None:
    """Die with the parent, even from an endless loop, and never outgrow the limit."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    size = memory_limit_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> int:
    """Serve until standard input ends."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    _bind_to_parent(settings["memory_limit_mb"])

    def answer(message: dict[str, object]) -> None:
        answers.write(json.dumps(message).encode() + b"\n")

    with _Border() as border:
        functions = {name: resolve_reward(name) for name in settings["rewards"]}
    if border.error:
        answer({"fatal": border.error})
        return 1
    answer({"ready": True})
    for line in sys.stdin.buffer:
        request = RewardRequest(**json.loads(line))
        result = RewardResult()
        with _Border() as border:
            result = score_response(
                functions[request.reward],
                request,
                format_pattern=settings["format_pattern"],
                format_coef=settings["format_coef"],
            )
        # After a MemoryError what is left of the heap is not to be trusted.
        answer(asdict(result) | {"error": border.error, "leaves": border.out_of_memory})
        if border.out_of_memory:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
