"""Every benchmark runs at toy size and writes a well-formed result, so that none can rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "tools" / "bench"
PARTS = {
    "__init__", "common", "plain_twin", "est_data", "est_variants", "est_summary", "trl_twin", "readme",
    "readme_tables", "all", "targets",
    "rollout_sglang",  # needs SGLang: tests/sglang/test_bench.py
}  # fmt: skip
BENCHES = sorted({p.stem for p in BENCH.glob("*.py")} - PARTS)


@pytest.mark.parametrize("name", BENCHES)
def test_benchmark_runs_at_toy_size(name, tmp_path):
    command = [sys.executable, "-m", f"tools.bench.{name}", "--toy", "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert set(result) == {"command", "machine", "versions", "rows", "summary"}
    assert result["rows"] and result["summary"]


@pytest.mark.parametrize("path", sorted((BENCH / "results").glob("*.json")), ids=lambda p: p.stem)
def test_published_result_is_well_formed(path):
    result = json.loads(path.read_text())
    assert set(result) == {"command", "machine", "versions", "rows", "summary"}
    assert result["rows"] and result["summary"] and "--toy" not in result["command"]
