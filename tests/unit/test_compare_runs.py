"""The comparison of runs counts steps, not records, and a step that was run again only once."""

import json

import pytest

from tools.compare_runs import read_run, table


def write_log(folder, records):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def step(iteration, seconds, tflops):
    return {"kind": "train", "iteration": iteration, "iteration-time": seconds, "throughput": tflops,
            "world-size": 2}  # fmt: skip


def test_figures_are_sums_over_steps(tmp_path):
    log = write_log(
        tmp_path / "logs",
        [step(10, 2.0, 1.0), {"kind": "validation", "iteration": 10, "lm loss validation": 4.0},
         step(15, 9.0, 9.0), step(15, 1.0, 3.0),  # 15 again after a resume
         {"kind": "validation", "iteration": 15, "lm loss validation": 3.0}],
    )  # fmt: skip
    run = read_run(log)
    assert (run.iterations, run.loss) == (15, 3.0)
    assert run.seconds == pytest.approx(10 * 2.0 + 5 * 1.0)
    assert run.flops == pytest.approx((10 * 2.0 * 1.0 + 5 * 1.0 * 3.0) * 1e12 * 2)
    lines = table({"dense": run, "EST": run}).splitlines()
    assert len(lines) == 3 and all("(100.0%)" in line for line in lines[1:])


def test_a_log_without_evaluation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="1 training and 0 validation records"):
        read_run(write_log(tmp_path / "logs", [step(1, 1.0, 1.0)]))
