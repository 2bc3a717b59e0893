"""The report's page: one HTML file with its data, its programs and Plotly inside; it loads nothing."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.report.colors import run_color
from megatron_tlt.report.panels import CHARTS, TITLES, Panel, panels_of
from megatron_tlt.report.run import AXES, Run
from megatron_tlt.report.summary import table_of
from megatron_tlt.report.timeline import Event
from megatron_tlt.report.timeline_part import timeline_part

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

ASSETS = Path(__file__).parent / "assets"


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
        "runs": [{"name": run.name, "color": run_color(n)} for n, run in enumerate(runs)],
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


def _axes_of(runs: Sequence[Run]) -> list[str]:
    return [axis for axis in AXES if any(axis in run.axes for run in runs)]


def _chart(runs: Sequence[Run], kind: str, number: int, panel: Panel) -> dict[str, object]:
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
