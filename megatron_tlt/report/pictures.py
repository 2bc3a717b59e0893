"""The report's charts as PNG files."""

from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.report.colors import label_colors, run_color
from megatron_tlt.report.panels import CHARTS, TITLES, Panel, panels_of
from megatron_tlt.report.run import Kind, Run
from megatron_tlt.report.timeline import Event, lanes_of

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

_DASHES = ("-", ":", "--", "-.", (0, (8, 3)), (0, (8, 2, 2, 2)))  # as many as the page has
_WIDTH, _HEIGHT = 7.0, 4.2
# A picture of more lanes is not readable.
_MOST_LANES = 60


def write_pictures(
    runs: Sequence[Run], timelines: dict[str, Sequence[Event]], folder: Path
) -> list[Path]:
    """One picture for each kind of run (its charts against steps, the losses against every axis) and one for
    each timeline."""
    written = []
    for kind in CHARTS:
        if panels := panels_of(runs, kind):
            written.append(_write_panels(runs, kind, panels, folder / f"{kind}.png"))
    for number, events in enumerate(timelines.values()):
        name = "timeline.png" if len(timelines) == 1 else f"timeline-{number + 1}.png"
        written.append(_write_timeline(events, folder / name))
    return written


def _write_panels(runs: Sequence[Run], kind: Kind, panels: Sequence[Panel], path: Path) -> Path:
    axes_of_first = [
        axis for axis in ("tokens", "FLOPs", "seconds") if any(axis in s.x for s in panels[0].series)
    ]
    first = [(panels[0], axis) for axis in ["steps", *axes_of_first]] if kind != "rl" else []
    drawn = [*first, *((panel, "steps") for panel in (panels if kind == "rl" else panels[1:]))]
    columns = 2
    lines = -(-len(drawn) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(_WIDTH * columns, _HEIGHT * lines), layout="constrained", squeeze=False
    )
    for place, (panel, axis) in zip(grid.flat, drawn):
        _draw(place, runs, kind, panel, axis)
    for place in grid.flat[len(drawn) :]:
        place.set_visible(False)
    figure.suptitle(TITLES[kind])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw(place, runs: Sequence[Run], kind: Kind, panel: Panel, axis: str) -> None:
    for series in panel.series:
        if axis in series.x:
            place.plot(
                series.x[axis], series.y, label=series.name, color=run_color(series.run),
                linestyle=_DASHES[series.style % len(_DASHES)],
                marker="o" if series.markers else None, markersize=4, linewidth=1.4,
            )  # fmt: skip
    for run in runs:
        if run.kind == kind and axis in run.axes:
            for stage in run.stages[:-1]:
                start, end = run.where([stage.start, stage.end])[axis]
                place.axvspan(start, end, color="#3c5078", alpha=0.12 / (1 + stage.number), linewidth=0)
    if panel.chart.log and all(y > 0 for series in panel.series for y in series.y):
        place.set_yscale("log")
    place.set(title=panel.chart.title, xlabel=axis, ylabel=panel.chart.unit)
    place.grid(alpha=0.3)
    place.legend(fontsize=7, framealpha=0.6)


def _write_timeline(events: Sequence[Event], path: Path) -> Path:
    """The lanes of the last whole step."""
    last = max(event.step for event in events)
    steps = {event.step for event in events}
    shown = last - 1 if last - 1 in steps else last
    chosen = [event for event in events if event.step == shown]
    lanes = lanes_of(chosen)[:_MOST_LANES]
    labels = list(dict.fromkeys(event.label for lane in lanes for event in lane.events))
    colors = dict(zip(labels, label_colors(labels)))
    figure, place = pyplot.subplots(figsize=(14, 1.5 + 0.22 * len(lanes)), layout="constrained")
    origin = min(event.start for event in chosen)
    for row, lane in enumerate(lanes):
        for label in labels:
            bars = [(e.start - origin, e.seconds) for e in lane.events if e.label == label]
            place.broken_barh(bars, (row - 0.4, 0.8), color=colors[label])
    place.set_yticks(range(len(lanes)), [lane.name for lane in lanes], fontsize=7)
    place.invert_yaxis()
    place.set(xlabel="seconds", title=f"Step {shown}")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[label]) for label in labels]
    place.legend(handles, labels, fontsize=7, ncols=min(len(labels), 8), loc="upper left",
                 bbox_to_anchor=(0, -0.5 / figure.get_figheight()), frameon=False)  # fmt: skip
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
