"""Rollouts on the real SGLang: its test suite, counted, with the figures that its tests report.

    source launch/sglang_environment.sh; "$PYTHON" -m tools.bench.sglang

`accept_ratio_vs_native`: accept length of our exported drafters in SGLang over that in the embedded engine,
the farthest from 1. `rl_steps`: RL steps with engines on two ranks, weights equal at both ends, one engine
killed. `--model` measures how long new weights of a Hugging Face folder take into a running engine by each
transport. `--toy` runs a unit test that needs no SGLang.
"""

import argparse
import importlib.metadata
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from pathlib import Path

from megatron_tlt.models.hf_files import SafetensorsFolder, read_hf_config
from megatron_tlt.rollout.sglang.config import SglangConfig
from megatron_tlt.rollout.sglang.engine import SglangEngine
from tools.bench.common import RESULTS, command_line, write_result

SUITE = ["tests/sglang"]
TOY = ["tests/unit/test_sglang_config.py", "-k", "version_spans or bad_settings"]


def run_suite(paths: list[str]) -> list[dict]:
    """One row a test: name, outcome, seconds, and what it recorded."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *paths, f"--junitxml={report}"],
            check=False, stdout=sys.stderr,
        )  # fmt: skip
        if not report.exists():
            raise SystemExit("pytest did not start: source launch/sglang_environment.sh first")
        return read_report(report)


def read_report(path: Path) -> list[dict]:
    """The rows of a pytest `--junitxml` file."""
    return [_row(case) for case in xml.parse(path).iter("testcase")]


def _row(case: xml.Element) -> dict:
    outcome = next(
        (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
    )
    recorded = {p.get("name"): float(p.get("value", "nan")) for p in case.iter("property")}
    name = f"{case.get('classname')}.{case.get('name')}"
    return {"test": name, "outcome": outcome, "seconds": float(case.get("time", 0)), **recorded}


def measure_transports(folder: Path, *, rounds: int) -> list[dict]:
    """One row a transport: seconds of an update of the whole target, the engines taking turns."""
    weights = SafetensorsFolder(folder)
    tensors = {name: weights[name][...] for name in weights}
    dtype = next(iter(tensors.values())).dtype
    engines, seconds = {}, {}
    try:
        for kind in ("folder", "tensor", "group"):
            config = SglangConfig(
                max_model_len=128, max_running_requests=4, dtype=dtype, weight_transport=kind
            )
            engines[kind], seconds[kind] = SglangEngine(read_hf_config(folder), config), []
            engines[kind].update_weights("target", tensors.items(), version=0)
        for version in range(1, rounds + 1):
            for kind, engine in engines.items():
                began = time.perf_counter()
                engine.update_weights("target", tensors.items(), version=version)
                seconds[kind].append(time.perf_counter() - began)
            print({kind: round(found[-1], 3) for kind, found in seconds.items()}, flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    return [
        {
            "transport": kind, "mib": size, "rounds": rounds, "median_s": statistics.median(found),
            "min_s": min(found), "max_s": max(found),
        }
        for kind, found in seconds.items()
    ]  # fmt: skip


def summarize(rows: list[dict]) -> dict:
    """Counts over the rows; a figure whose test did not report it is None."""
    ratios = [row["accept_ratio"] for row in rows if "accept_ratio" in row]
    steps = [row["rl_steps"] for row in rows if "rl_steps" in row]
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    return {
        "tests": sum(row["outcome"] != "skipped" for row in rows),
        "failures": sum(row["outcome"] in ("failure", "error") for row in rows),
        "skipped": sum(row["outcome"] == "skipped" for row in rows),
        "accept_ratio_vs_native": max(ratios, key=lambda r: abs(r - 1), default=None),
        "rl_steps": int(max(steps)) if steps else None,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "sglang": importlib.metadata.version("sglang") if "sglang" in installed else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--reports", type=Path, nargs="+",
                        help="sum up these pytest --junitxml files of the suite, run nothing")  # fmt: skip
    parser.add_argument("--model", type=Path, help="Hugging Face folder whose weights are handed over")
    parser.add_argument("--rounds", type=int, default=7, help="updates of each transport")
    args = parser.parse_args()
    if args.reports:
        rows = [row for path in args.reports for row in read_report(path)]
    else:
        rows = run_suite(TOY if args.toy else SUITE)
    summary = summarize(rows)
    if args.model is not None:
        transports = measure_transports(args.model, rounds=args.rounds)
        summary |= {"update_mib": transports[0]["mib"]}
        summary |= {f"update_s_{row['transport']}": row["median_s"] for row in transports}
        rows += transports
    path = write_result(
        "sglang", command_line("tools.bench.sglang"), rows, summary, folder=args.output
    )
    print(f"{path}: {summary}")
    if summary["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
