"""The timeline as a Chrome trace: for chrome://tracing and https://ui.perfetto.dev (both read local files).

Format: "Trace Event Format" (JSON object form): complete events "X" in microseconds, a process for each rank,
a thread for each lane, names in metadata events "M".
"""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.files import write_text
from megatron_tlt.report.timeline import Lane


def trace_events(lanes: Sequence[Lane]) -> list[dict[str, object]]:
    """The events of `lanes`; time starts with the first."""
    origin = min((event.start for lane in lanes for event in lane.events), default=0.0)
    out: list[dict[str, object]] = []
    for rank in sorted({lane.rank for lane in lanes}):
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
    for number, lane in enumerate(lanes):
        place = {"pid": lane.rank, "tid": number}
        out.append({"ph": "M", "name": "thread_name", **place, "args": {"name": lane.name}})
        out.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}})
        out += [
            {
                "ph": "X", "name": event.label, "cat": lane.kind, **place,
                "ts": round((event.start - origin) * 1e6, 1), "dur": round(event.seconds * 1e6, 1),
                "args": {"step": event.step} | dict(event.details),
            }
            for event in lane.events
        ]  # fmt: skip
    return out


def write_chrome_trace(path: Path, lanes: Sequence[Lane]) -> None:
    events = {"traceEvents": trace_events(lanes), "displayTimeUnit": "ms"}
    write_text(path, json.dumps(events, separators=(",", ":"), allow_nan=False))
