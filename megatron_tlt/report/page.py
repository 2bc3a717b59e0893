"""The report's page: one HTML file with its data, its programs and Plotly inside; it loads nothing."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.report.columns import columns_of
from megatron_tlt.report.panels import CHARTS, TITLES, panels_of
from megatron_tlt.report.run import AXES, Run
from megatron_tlt.report.summary import table_of
from megatron_tlt.report.timeline import (
    WAITING,
    Acceptance,
    Event,
    Ledger,
    acceptance_of,
    lanes_of,
    ledger_of,
)

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

ASSETS = Path(__file__).parent / "assets"
COLORS = ("#2f6fde", "#e07b1f", "#2a9d5c", "#c23b5a", "#7d55c7", "#0f9aa8", "#8c6d3f", "#d45fb4")


def page(runs: Sequence[Run], timelines: dict[str, Sequence[Event]], *, traces: dict[str, str]) -> str:
    """The HTML of a report.

    `timelines`: run name -> its events; `traces`: run name -> file name of its Chrome trace.
    """
    sections, charts = [], []
    for kind in CHARTS:
        if not any(run.kind == kind for run in runs):
            continue
        found = [_chart(runs, kind, n, panel) for n, panel in enumerate(panels_of(runs, kind))]
        head, rows = table_of(runs, kind)
        sections.append(
            {"title": TITLES[kind], "head": head, "rows": rows, "charts": [chart["id"] for chart in found]}
        )
        charts += found
    drawn = [timeline_part(number, *item, traces) for number, item in enumerate(timelines.items())]
    data = {
        "runs": [{"name": run.name, "color": _color(n)} for n, run in enumerate(runs)],
        "charts": charts,
        "plain": [chart for part in drawn for chart in part["plain"]],
        "timelines": [part["columns"] for part in drawn],
    }
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html.jinja").render(
        title="Report: " + ", ".join(run.name for run in runs[:4]) + " ..." * (len(runs) > 4),
        runs=data["runs"], sections=sections, axes=_axes_of(runs), timelines=drawn, data=_embedded(data),
        plotly=Markup(get_plotlyjs()), css=_asset("page.css"),
        charts_js=_asset("charts.js"), timeline_js=_asset("timeline.js"),
    )  # fmt: skip


def _asset(name: str) -> Markup:
    return Markup((ASSETS / name).read_text(encoding="utf-8"))


def _embedded(data: object) -> Markup:
    """JSON that no text in it can end or escape from its script element."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def _finite(value: object) -> object:
    """JSON has no NaN: such a point is missing in the line."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _axes_of(runs: Sequence[Run]) -> list[str]:
    return [axis for axis in AXES if any(axis in run.axes for run in runs)]


def _chart(runs: Sequence[Run], kind: str, number: int, panel) -> dict[str, object]:
    stages = [
        {"run": n, "number": stage.number, "x": run.where([stage.start, stage.end])}
        for n, run in enumerate(runs)
        if run.kind == kind
        for stage in run.stages
    ]
    return {
        "id": f"{kind}-{number}", "title": panel.chart.title, "unit": panel.chart.unit,
        "log": panel.chart.log, "stages": stages,
        "series": [
            {"run": s.run, "name": s.name, "x": s.x, "y": s.y, "style": s.style, "markers": s.markers}
            for s in panel.series
        ],
    }  # fmt: skip


def timeline_part(
    number: int, name: str, events: Sequence[Event], traces: dict[str, str]
) -> dict[str, object]:
    """What the page shows of one run's timeline."""
    ledger, lanes = ledger_of(events), lanes_of(events)
    head, rows = ledger_table(ledger)
    plain = [*_ledger_charts(f"timeline-{number}", events), *_acceptance_charts(
        f"timeline-{number}", acceptance_of(events))]  # fmt: skip
    return {
        "name": name, "count": len(events), "trace": traces.get(name), "columns": columns_of(lanes),
        "ledger_note": f"Seconds of each rank over {ledger.wall:,.2f} s of wall-clock time; of all ranks' "
        f"time {ledger.share(WAITING):.1%} was waiting and "
        f"{ledger.share(['unaccounted']):.1%} is in no event.",
        "head": head, "rows": rows, "plain": plain, "charts": [chart["id"] for chart in plain],
    }  # fmt: skip


def ledger_table(ledger: Ledger) -> tuple[list[str], list[list[str]]]:
    """(head, a row a rank and one for all)."""
    phases = ledger.phases
    rows = [
        [f"rank {rank}", *(_spent(spent.get(phase, 0.0), ledger.wall) for phase in phases)]
        for rank, spent in ledger.seconds.items()
    ]
    total = ledger.wall * len(ledger.seconds)
    sums = [sum(spent.get(phase, 0.0) for spent in ledger.seconds.values()) for phase in phases]
    return ["", *phases], [*rows, ["all", *(_spent(seconds, total) for seconds in sums)]]


def _spent(seconds: float, total: float) -> str:
    return f"{seconds:,.2f} ({seconds / max(total, 1e-12):.1%})"


def _ledger_charts(prefix: str, events: Sequence[Event]) -> list[dict[str, object]]:
    """Each step's ledger, mean over the ranks."""
    steps = sorted({event.step for event in events if event.kind == "phase"})
    if not steps:
        return []
    ledgers = [ledger_of([event for event in events if event.step == step]) for step in steps]
    phases = list(dict.fromkeys(phase for ledger in ledgers for phase in ledger.phases))
    series = [
        {"name": phase, "x": steps, "y": [ledger.share([phase]) * ledger.wall for ledger in ledgers]}
        for phase in phases
    ]
    return [
        {"id": f"{prefix}-ledger", "title": "Each step's time by phase, mean over ranks", "x": "step",
         "unit": "s", "log": False, "bar": True, "series": series}
    ]  # fmt: skip


def _acceptance_charts(prefix: str, acceptance: Acceptance) -> list[dict[str, object]]:
    charts = []
    if acceptance.by_position:
        series = [
            {"name": name, "x": list(range(1, len(shares) + 1)), "y": shares, "mode": "lines+markers"}
            for name, shares in acceptance.by_position.items()
            if shares
        ]
        charts.append(
            {"id": f"{prefix}-position", "title": "Drafts accepted, by position", "x": "draft position",
             "unit": "share of requests", "log": False, "bar": False, "series": series}
        )  # fmt: skip
    if acceptance.by_batch:
        series = [
            {"name": name, "x": [str(size) for size in sizes], "y": list(sizes.values()),
             "mode": "lines+markers"}
            for name, sizes in acceptance.by_batch.items()
        ]  # fmt: skip
        charts.append(
            {"id": f"{prefix}-batch", "title": "Tokens a request and step, by running batch",
             "x": "batch size up to", "unit": "tokens", "log": False, "bar": False, "series": series}
        )  # fmt: skip
    return charts
