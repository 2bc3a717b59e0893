"""The benchmark against SGLang runs at toy size, so that it cannot rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_embedded_engine_is_compared_with_sglang(tmp_path):
    command = [sys.executable, "-m", "tools.bench.rollout_sglang", "--toy", "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "rollout_sglang.json").read_text())
    assert {row["batch"] for row in result["rows"]} == {1, 4} and result["summary"]["cells"] == 2
