"""Metrics: plain dictionaries from name to number, and the places they are kept.

Whoever computes a metric returns it; only the loop that owns a run hands it to a sink. Every run keeps
both files: `metrics.jsonl`, one JSON object a line, and TensorBoard events under Megatron's tags.
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

Metrics = Mapping[str, float]


class MetricSink(Protocol):
    """Keeps metrics of one kind ("train", "validation", ...) at one iteration."""

    def write(self, kind: str, metrics: Metrics, *, iteration: int, samples: int) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends {"kind", "iteration", "consumed_samples", "time", name: value ...} lines to a file.

    JSON has no NaN: a value that is not finite is written as the string "nan", "inf" or "-inf", so that
    it is neither lost nor makes the line unreadable.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")

    def write(self, kind: str, metrics: Metrics, *, iteration: int, samples: int) -> None:
        record = {"kind": kind, "iteration": iteration, "consumed_samples": samples}
        record["time"] = round(time.time(), 3)
        record.update({name: _json_number(value) for name, value in metrics.items()})
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars under Megatron's tags: NAME by iteration and "NAME vs samples" by consumed samples."""

    def __init__(self, folder: Path) -> None:
        # Two seconds to import, and needed on one rank only.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder), max_queue=100)

    def write(self, kind: str, metrics: Metrics, *, iteration: int, samples: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
            self._writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        self._writer.close()


class MetricSinks:
    """Writes to several sinks; with none it does nothing (ranks that do not log)."""

    def __init__(self, sinks: list[MetricSink]) -> None:
        self._sinks = sinks

    def write(self, kind: str, metrics: Metrics, *, iteration: int, samples: int) -> None:
        for sink in self._sinks:
            sink.write(kind, metrics, iteration=iteration, samples=samples)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _json_number(value: float) -> float | str:
    return value if isinstance(value, int) or math.isfinite(value) else str(float(value))
