"""The engine's process: a world of its own under torchrun, and gone when its trainer is."""

import os
import signal
import subprocess
import sys
import time

from megatron_tlt.types import SamplingParams
from tests.sglang.models import PROMPTS, native_engine, sglang_engine, target, tokens_of

# Says the process of its engine, then starts it as any trainer does.
TRAINER = """
import subprocess
from megatron_tlt.rollout.sglang import process
from tests.sglang.models import sglang_engine, target

class Loud(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        print(self.pid, flush=True)

process.subprocess.Popen = Loud
sglang_engine(target())
"""


def lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_engine_starts_beside_a_rank_that_torchrun_has_started(monkeypatch):
    """With torchrun's variables in its environment SGLang would wait for a store that nobody opens."""
    variables = {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run", "RANK": "1", "LOCAL_RANK": "1",
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29999",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model, params = target(), SamplingParams(temperature=0, max_tokens=8)
    engine = sglang_engine(model, timeout_s=120.0)
    try:
        found = tokens_of(engine.generate(PROMPTS, params))
    finally:
        engine.close()
    assert found == tokens_of(native_engine(model).generate(PROMPTS, params))


def test_a_trainer_killed_while_its_engine_starts_leaves_no_process():
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    group = int(trainer.stdout.readline())
    time.sleep(8.0)
    assert trainer.poll() is None and lives(group)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(timeout=10)
    deadline = time.monotonic() + 60
    while lives(group) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not lives(group)
