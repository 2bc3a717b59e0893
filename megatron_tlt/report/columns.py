"""The timeline's events as columns of numbers, small and quick to read for a browser."""

import base64
from collections.abc import Sequence

import numpy

from megatron_tlt.report.colors import label_colors
from megatron_tlt.report.timeline import Event, Lane

# Times are whole numbers of a unit that fits the span into 32 bits, at least this many seconds.
_FINEST = 1e-6


def columns_of(lanes: Sequence[Lane]) -> dict[str, object]:
    """Lanes and events, lane after lane, each by start.

    `start`, `end` (in `unit` seconds from the first event on), `step`, `label` and `text` (numbers in
    `labels`, which have `colors`, and `texts`) are base64 of little-endian uint32; lane i has the events
    `lanes[i].first .. lanes[i + 1].first`.
    """
    events = [event for lane in lanes for event in lane.events]
    origin = min((event.start for event in events), default=0.0)
    span = max((event.end for event in events), default=0.0) - origin
    unit = max(_FINEST, span / (2**32 - 2))
    labels, texts = _Strings(), _Strings()
    described, first = [], 0
    for lane in lanes:
        described.append({"name": lane.name, "rank": lane.rank, "kind": lane.kind, "first": first})
        first += len(lane.events)
    return {
        "unit": unit,
        "count": len(events),
        "lanes": described,
        "start": _encoded([(event.start - origin) / unit for event in events]),
        "end": _encoded([(event.end - origin) / unit for event in events]),
        "step": _encoded([event.step for event in events]),
        "label": _encoded([labels.number(event.label) for event in events]),
        "text": _encoded([texts.number(_text(event)) for event in events]),
        "labels": labels.known,
        "colors": label_colors(labels.known),
        "texts": texts.known,
    }


class _Strings:
    """Numbers strings in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def known(self) -> list[str]:
        return list(self._numbers)


def _text(event: Event) -> str:
    """Details for hovering and filtering. Example: "batch 8, tokens 21"."""
    shown = {name: value for name, value in event.details.items() if name != "strategy"}
    return ", ".join(f"{name} {_short(value)}" for name, value in shown.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _encoded(values: Sequence[float]) -> str:
    return base64.b64encode(numpy.round(values).astype("<u4").tobytes()).decode("ascii")
