"""The report's figures: sums over steps, stages, ledgers, acceptance; one file that loads nothing."""

import base64
import json
import re
from importlib.resources import files

import numpy
import pytest

from megatron_tlt.report.__main__ import main
from megatron_tlt.report.chrome_trace import trace_events
from megatron_tlt.report.columns import columns_of
from megatron_tlt.report.panels import CHARTS, panels_of
from megatron_tlt.report.pictures import _DASHES
from megatron_tlt.report.run import Stage, find_runs
from megatron_tlt.report.summary import rl_figures, table_of
from megatron_tlt.report.timeline import acceptance_of, lanes_of, ledger_of, read_timeline
from tests.unit.report_logs import (
    pretrain_records,
    rl_records,
    timeline_events,
    write_log,
    write_timeline,
)


def only_run(folder):
    (run,) = find_runs([folder])
    return run


def test_axes_are_sums_over_steps_and_evaluations_lie_between(tmp_path):
    run = only_run(write_log(tmp_path / "a", pretrain_records()))
    assert run.kind == "pretrain" and run.name == "a"
    assert run.axes["seconds"] == pytest.approx([20.0, 30.0])
    assert run.axes["FLOPs"] == pytest.approx([20 * 1e12 * 2, 20 * 1e12 * 2 + 10 * 3e12 * 2])
    x, y = run.series("lm loss validation", evaluation=True)
    assert y == [6.0, 4.5] and x["steps"] == [5.0, 20.0] and x["seconds"] == pytest.approx([10.0, 30.0])


def test_a_step_that_was_run_again_counts_once(tmp_path):
    records = pretrain_records()
    again = [r | {"iteration-time": 4.0} for r in records if r["iteration"] == 20 and r["kind"] == "train"]
    run = only_run(write_log(tmp_path / "a", [*records, *again]))
    assert run.axes["seconds"] == pytest.approx([20.0, 60.0])


def test_rl_time_and_tokens_add_up(tmp_path):
    run = only_run(write_log(tmp_path / "a", rl_records()))
    assert run.kind == "rl" and "FLOPs" not in run.axes
    assert run.axes["seconds"] == pytest.approx([10.0, 30.0])
    assert run.axes["tokens"] == pytest.approx([50.0, 150.0])


def test_stages_reach_from_end_to_end(tmp_path):
    run = only_run(write_log(tmp_path / "a", pretrain_records(est=True)))
    assert run.stages == [Stage(number=0, start=0, end=15), Stage(number=1, start=15, end=20)]
    assert run.where([15])["seconds"] == pytest.approx([25.0])


def test_runs_are_overlaid_by_kind_and_tabulated(tmp_path):
    write_log(tmp_path / "dense", pretrain_records())
    write_log(tmp_path / "est", pretrain_records(est=True))
    write_log(tmp_path / "rl" / "grpo", rl_records())
    runs = find_runs([tmp_path])
    assert [run.name for run in runs] == ["dense", "est", "rl/grpo"]
    loss = panels_of(runs, "pretrain")[0]
    assert [s.name for s in loss.series] == [
        "dense: training", "dense: validation", "est: training", "est: validation"
    ]  # fmt: skip
    titles = [panel.chart.title for panel in panels_of(runs, "rl")]
    assert "Held-out pass@k" in titles and "Entropy" not in titles
    head, rows = table_of(runs, "pretrain")
    assert rows[1][head.index("validation loss")] == "6.0000 → 4.5000"
    head, (row,) = table_of(runs, "rl")
    assert row[head.index("held-out pass@1")] == "0.250 → 0.500"
    assert row[head.index("largest log-prob difference")] == "2.0e-06"


def test_the_lines_of_one_run_in_one_chart_differ_in_their_dashes():
    for charts in CHARTS.values():
        assert all(len(c.train) + len(c.evaluation) <= len(set(_DASHES)) for c in charts)
    script = (files("megatron_tlt.report") / "assets" / "charts.js").read_text()
    (dashes,) = re.findall(r"DASHES = \[(.*?)\]", script)
    assert len(dashes.split(",")) == len(_DASHES)


def test_bad_input_is_said_with_file_and_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
    log = write_log(tmp_path / "a", rl_records()) / "logs" / "metrics.jsonl"
    log.write_text('{"kind": "train", "iteration": 1}\n[]\n')
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl line 2" in capsys.readouterr().err


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    run = write_log(tmp_path / "a", rl_records())
    write_timeline(run, timeline_events())
    for path in (run / "logs" / "metrics.jsonl", run / "logs" / "timeline" / "rank00000.jsonl"):
        with path.open("a") as file:
            file.write('{"kind": "tra')
    assert only_run(run).axes["steps"] == [1, 2]
    assert len(read_timeline(run / "logs")) == len(timeline_events())


@pytest.fixture
def events(tmp_path):
    run = write_log(tmp_path / "run", rl_records())
    write_timeline(run, timeline_events())
    return read_timeline(run / "logs")


def test_every_second_of_every_rank_is_in_the_ledger(events):
    ledger = ledger_of(events)
    assert ledger.wall == pytest.approx(4.0)
    assert ledger.seconds[0] == pytest.approx({"generate": 4.0, "unaccounted": 0.0})
    assert ledger.seconds[1] == pytest.approx(
        {"generate": 1.0, "train_drafter": 2.0, "wait": 1.0, "unaccounted": 0.0}
    )
    assert ledger.share(["wait"]) == pytest.approx(1 / 8)


def test_phases_inside_others_count_once(events):
    inside = [e for e in events if e.rank == 1 and e.phase == "train_drafter"][0]
    around = type(inside)(rank=1, step=1, phase="wait", start=100.5, end=104.0)
    spent = ledger_of([*(e for e in events if e.rank == 1), around]).seconds[1]
    assert sum(spent.values()) == pytest.approx(4.0) and spent["train_drafter"] == pytest.approx(2.0)


def test_lanes_hold_events_that_do_not_overlap(events):
    lanes = lanes_of(events)
    assert [lane.name for lane in lanes] == [
        "rank 0 phases", "rank 0 strategy", "rank 1 phases", "rank 0 request 1", "rank 0 request 2"
    ]  # fmt: skip
    for lane in lanes:
        assert all(a.end <= b.start for a, b in zip(lane.events, lane.events[1:]))
    assert sum(len(lane.events) for lane in lanes) == len(events)


def test_acceptance_by_position_and_batch_size(events):
    acceptance = acceptance_of(events)
    assert acceptance.by_position == {"ngram_2_1_3": pytest.approx([4 / 6, 2 / 6])}
    assert acceptance.by_batch == {
        "ngram_2_1_3": pytest.approx({2: 1.5, 4: 9 / 4}), "off": pytest.approx({1: 1.0})
    }  # fmt: skip


def test_chrome_trace_has_a_complete_event_for_each(events):
    trace = trace_events(lanes_of(events))
    complete = [event for event in trace if event["ph"] == "X"]
    assert len(complete) == len(events)
    (trained,) = [event for event in complete if event["name"] == "train_drafter"]
    assert (trained["pid"], trained["ts"], trained["dur"]) == (1, 1e6, 2e6)
    assert trained["args"] == {"step": 1, "updates": 7}
    names = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert "rank 0 strategy" in names


def test_columns_give_the_times_back(events):
    lanes = lanes_of(events)
    columns = columns_of(lanes)
    start, end = (
        numpy.frombuffer(base64.b64decode(columns[name]), "<u4") * columns["unit"]
        for name in ("start", "end")
    )
    flat = [event for lane in lanes for event in lane.events]
    numpy.testing.assert_allclose(start, [event.start - 100.0 for event in flat], atol=1e-6)
    numpy.testing.assert_allclose(end, [event.end - 100.0 for event in flat], atol=1e-6)
    assert [lane["first"] for lane in columns["lanes"]] == [0, 1, 4, 7, 9]


def test_a_line_that_is_no_event_is_refused(tmp_path):
    run = write_log(tmp_path / "run", rl_records())
    write_timeline(run, [timeline_events()[0], {"rank": 0, "phase": "wait"}])
    with pytest.raises(ValueError, match="rank00000.jsonl line 2 .* lacks step, start, end"):
        read_timeline(run / "logs")


def test_the_figures_of_several_seeds_are_means_and_extremes(tmp_path):
    for name, after in (("a", 0.5), ("b", 0.25), ("c", 0.75)):
        records = rl_records()
        (key,) = {k for record in records for k in record if k.endswith("-pass@1")}
        last = [record for record in records if key in record][-1]
        last[key] = after
        write_log(tmp_path / name, records)
    write_log(tmp_path / "pretrain", pretrain_records())
    figures = rl_figures(find_runs([tmp_path]))
    assert figures["pass_before"] == 0.25 and figures["pass_after"] == pytest.approx(0.5)
    assert (figures["pass_after_lowest"], figures["pass_after_highest"]) == (0.25, 0.75)
    assert figures["rl_runs"] == 3


def test_the_report_is_one_file_with_pictures_and_a_trace(tmp_path, capsys):
    run = write_log(tmp_path / "<b>grpo</b>", rl_records())
    write_timeline(run, timeline_events())
    assert main([str(run), "--figures", str(tmp_path / "figures.json")]) == 0
    folder = run / "report"
    assert {path.name for path in folder.iterdir()} == {"report.html", "rl.png", "timeline.png", "trace.json"}
    page = (folder / "report.html").read_text()
    assert "<b>grpo" not in page.replace("\\u003cb>grpo", "")
    own = re.sub(r"(?s)<script>/\*\*.*?</script>", "", page)  # without Plotly, which names its home
    assert not re.search(r"""(src|href)=["']?(http|//)""", own)
    assert "2.0e-06" in capsys.readouterr().out
    assert json.loads((tmp_path / "figures.json").read_text()) == {
        "pass_before": 0.25, "pass_after": 0.5, "pass_after_lowest": 0.5, "pass_after_highest": 0.5,
        "rl_runs": 1, "max_logprob_diff": pytest.approx(2e-6),
    }  # fmt: skip
    assert len(json.loads((folder / "trace.json").read_text())["traceEvents"]) > 10
