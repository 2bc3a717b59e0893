"""Rollouts on the real SGLang: its test suite, counted, with the figures that its tests report.

    source launch/sglang_environment.sh; "$PYTHON" -m tools.bench.sglang

`accept_ratio_vs_native`: accept length of our exported drafters in SGLang over that in the embedded engine,
the farthest from 1. `rl_steps`: RL steps with engines on two ranks, weights equal at both ends, one engine
killed. `--toy` runs a unit test that needs no SGLang.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

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
    args = parser.parse_args()
    if args.reports:
        rows = [row for path in args.reports for row in read_report(path)]
    else:
        rows = run_suite(TOY if args.toy else SUITE)
    summary = summarize(rows)
    path = write_result(
        "sglang", command_line("tools.bench.sglang"), rows, summary, folder=args.output
    )
    print(f"{path}: {summary}")
    if summary["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
