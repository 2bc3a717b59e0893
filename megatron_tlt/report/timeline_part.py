"""What the page shows of a run's timeline: its columns, its ledger as table and chart, acceptance."""

from collections import defaultdict
from collections.abc import Sequence

from megatron_tlt.report.colors import label_colors
from megatron_tlt.report.columns import columns_of
from megatron_tlt.report.timeline import (
    WAITING,
    Acceptance,
    Event,
    Ledger,
    acceptance_of,
    lanes_of,
    ledger_of,
)


def timeline_part(
    number: int, name: str, events: Sequence[Event], traces: dict[str, str]
) -> dict[str, object]:
    """What the page shows of one run's timeline."""
    ledger, lanes = ledger_of(events), lanes_of(events)
    head, rows = ledger_table(ledger)
    prefix = f"timeline-{number}"
    plain = _ledger_charts(prefix, events) + _acceptance_charts(prefix, acceptance_of(events))
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
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "phase":
            by_step[event.step].append(event)
    if not by_step:
        return []
    steps = sorted(by_step)
    ledgers = [ledger_of(by_step[step]) for step in steps]
    phases = list(dict.fromkeys(phase for ledger in ledgers for phase in ledger.phases))
    series = [
        {"name": phase, "x": steps, "y": [ledger.share([phase]) * ledger.wall for ledger in ledgers],
         "marker": {"color": color}}
        for phase, color in zip(phases, label_colors(phases))
    ]  # fmt: skip
    return [
        {"id": f"{prefix}-ledger", "title": "Each step's time by phase, mean over ranks", "x": "step",
         "unit": "s", "log": False, "bar": True, "series": series}
    ]  # fmt: skip


def _acceptance_charts(prefix: str, acceptance: Acceptance) -> list[dict[str, object]]:
    charts = []
    names = list(acceptance.by_batch)
    colors = dict(zip(names, label_colors(names)))
    if acceptance.by_position:
        series = [
            {"name": name, "x": list(range(1, len(shares) + 1)), "y": shares, "mode": "lines+markers",
             "line": {"color": colors[name]}}
            for name, shares in acceptance.by_position.items()
            if shares
        ]  # fmt: skip
        charts.append(
            {"id": f"{prefix}-position", "title": "Drafts accepted, by position", "x": "draft position",
             "unit": "share of requests", "log": False, "bar": False, "series": series}
        )  # fmt: skip
    if acceptance.by_batch:
        series = [
            {"name": name, "x": list(sizes), "y": list(sizes.values()),
             "mode": "lines+markers", "line": {"color": colors[name]}}
            for name, sizes in acceptance.by_batch.items()
        ]  # fmt: skip
        charts.append(
            {"id": f"{prefix}-batch", "title": "Tokens a request and step, by running batch",
             "x": "batch size up to", "powers": True, "unit": "tokens", "log": False, "bar": False,
             "series": series}
        )  # fmt: skip
    return charts
