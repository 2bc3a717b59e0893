"""The engine's process as seen from a trainer rank: start, messages, answers, and its end."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing import Pipe
from typing import Any

_MODULE = "megatron_tlt.rollout.sglang.host"
_GRACE_S = 20.0
_TORCHRUN = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


class EngineDied(RuntimeError):
    """The engine's process ended or went silent."""


class EngineError(RuntimeError):
    """The engine answered with an error."""


def check_installed(device: str) -> None:
    """Raise ValueError where this interpreter lacks SGLang, or on a CPU what stands in for its kernels."""
    needed = ["sglang"] + ["sgl_kernel"] * (device == "cpu")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{missing} cannot be imported by {sys.executable}: source launch/sglang_environment.sh, which "
            "installs SGLang and puts the stand-ins for a CPU on PYTHONPATH"
        )


class EngineProcess:
    """One running engine. Example: EngineProcess({"model_path": ...}, environment={}, timeout_s=600)."""

    def __init__(
        self, arguments: Mapping[str, Any], *, environment: Mapping[str, str], timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self.outputs: deque[dict[str, Any]] = deque()
        """Answers to `post`, in the order in which they came."""
        self._number = 0
        self._posted: set[int] = set()
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=_inherited() | dict(environment),
            start_new_session=True,  # so that its whole family can be ended
        )
        theirs.close()
        try:
            self.call("start", arguments=dict(arguments))
        except (EngineDied, EngineError):
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def post(self, op: str, **fields: Any) -> int:
        """Send without waiting; the answer, under the returned number, appears in `outputs`."""
        number = self._send(op, fields)
        self._posted.add(number)
        return number

    def call(self, op: str, **fields: Any) -> Any:
        """Send, wait, and return the answer's value. Raises EngineError or EngineDied."""
        return self.wait(self.ask(op, **fields))

    def ask(self, op: str, **fields: Any) -> int:
        """Send; `wait` has the answer, before anything else is asked."""
        return self._send(op, fields)

    def wait(self, number: int) -> Any:
        """The value of the answer to `ask`."""
        while True:
            answer = self._receive()
            if answer["id"] in self._posted:
                self._take(answer)
            elif answer["id"] == number:
                if "error" in answer:
                    raise EngineError(answer["error"])
                return answer["value"]

    def next_output(self) -> dict[str, Any]:
        """The next answer to a `post`. Raises EngineDied."""
        while not self.outputs:
            answer = self._receive()
            assert answer["id"] in self._posted, f"answer {answer['id']} was not asked for"
            self._take(answer)
        return self.outputs.popleft()

    def _take(self, answer: dict[str, Any]) -> None:
        self._posted.discard(answer["id"])
        self.outputs.append(answer)

    def _send(self, op: str, fields: dict[str, Any]) -> int:
        self._number += 1
        message = json.dumps({"id": self._number, "op": op} | fields).encode()
        try:
            self.pipe.send_bytes(message)
        except OSError as error:
            raise EngineDied(f"the SGLang process {self.pid} has ended ({error})") from error
        return self._number

    def _receive(self) -> dict[str, Any]:
        try:
            if not self.pipe.poll(self.timeout_s):
                raise EngineDied(f"the SGLang process {self.pid} said nothing for {self.timeout_s} s")
            return json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineDied(
                f"the SGLang process {self.pid} ended with exit code {self.process.poll()}; what it said is "
                "above"
            ) from error

    def close(self) -> None:
        """End the process and all of its children."""
        self.pipe.close()
        deadline = time.monotonic() + _GRACE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if _group_lives(self.pid):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(timeout=_GRACE_S)


def _inherited() -> dict[str, str]:
    """This process's variables without torchrun's: the engine's processes are a world of their own, which
    would otherwise look for its store at the trainer's."""
    return {
        name: value for name, value in os.environ.items()
        if name not in _TORCHRUN and not name.startswith("TORCHELASTIC_")
    }  # fmt: skip


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
