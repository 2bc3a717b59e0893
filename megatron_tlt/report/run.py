"""What a run has logged, read back: its training records against steps, tokens, FLOPs and seconds."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy

Kind = Literal["pretrain", "sft", "rl"]
Record = dict[str, float]
METRICS = "metrics.jsonl"
# In the order in which the report offers them.
AXES = ("steps", "tokens", "FLOPs", "seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """An EST stage: the steps after `start` up to `end`. Example: Stage(number=0, start=0, end=25)."""

    number: int
    start: int
    end: int


@dataclass(kw_only=True, slots=True)
class Run:
    """One run's records, one an iteration: of an iteration that was repeated after a resume, the last."""

    name: str
    log_dir: Path
    kind: Kind
    train: list[Record]
    evaluations: list[Record]
    """Validation losses of pretraining and fine-tuning, held-out metrics of RL."""
    axes: dict[str, list[float]] = field(init=False)
    """Axis -> its value at each training record; an axis that the log does not give is absent."""
    stages: list[Stage] = field(init=False)
    """Empty without subnets."""

    def __post_init__(self) -> None:
        self.axes = _axes(self.train, self.kind)
        self.stages = _stages(self.train)

    def where(self, iterations: Sequence[float]) -> dict[str, list[float]]:
        """Each axis's values at `iterations`, linear between the training records."""
        known = [0.0, *self.axes["steps"]]
        others = {axis: values for axis, values in self.axes.items() if axis != "steps"}
        return {"steps": list(iterations)} | {
            axis: numpy.interp(iterations, known, [0.0, *values]).tolist()
            for axis, values in others.items()
        }

    def series(self, name: str, *, evaluation: bool = False) -> tuple[dict[str, list[float]], list[float]]:
        """(x by axis, y) of a metric, where it was logged; both empty when it never was."""
        records = self.evaluations if evaluation else self.train
        found = [record for record in records if name in record]
        if not found:
            return {}, []
        return self.where([r["iteration"] for r in found]), [r[name] for r in found]

    def names(self, *, evaluation: bool = False) -> list[str]:
        """Every metric of the records, in order of appearance."""
        records = self.evaluations if evaluation else self.train
        return list(dict.fromkeys(name for record in records for name in record))


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs at or below `folders`, by path. Raises ValueError for a folder without one."""
    runs: dict[Path, Run] = {}
    for folder in folders:
        paths = sorted(folder.rglob(METRICS))
        if not paths:
            raise ValueError(f"no {METRICS} in or below {folder}: give a run's checkpoint.save or log folder")
        for path in paths:
            runs[path.resolve()] = read_run(path, name=_name(path, folder, alone=len(paths) == 1))
    _tell_apart(list(runs.values()))
    return list(runs.values())


def read_run(path: Path, *, name: str) -> Run:
    """The run of a metrics.jsonl. Raises ValueError for a line that is no record, with its number."""
    by_kind: dict[str, dict[int, Record]] = {"train": {}, "validation": {}, "eval": {}}
    text = path.read_text(encoding="utf-8")
    # A line is whole when its newline is there: a running or killed run may have begun another.
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            kind, iteration = record["kind"], record["iteration"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number} is no metrics record: {error}") from error
        if kind in by_kind:
            by_kind[kind][iteration] = _numbers(record)
    train, *others = ([found[i] for i in sorted(found)] for found in by_kind.values())
    evaluations = others[1] or others[0]
    return Run(
        name=name, log_dir=path.parent, kind=_kind(train, bool(others[1])), train=train,
        evaluations=evaluations,
    )  # fmt: skip


def _kind(train: list[Record], evaluated: bool) -> Kind:
    first = train[0] if train else {}
    if evaluated or any(name.startswith("rollout/") for name in first):
        return "rl"
    return "sft" if "response-tokens" in first else "pretrain"


def _numbers(record: dict[str, object]) -> Record:
    """Values that are not finite were written as strings."""
    return {name: float(value) for name, value in record.items() if name != "kind"}


def _axes(train: list[Record], kind: Kind) -> dict[str, list[float]]:
    steps = [record["iteration"] for record in train]
    counts = numpy.diff([0.0, *steps])
    axes = {"steps": steps}
    if kind == "rl":
        seconds = [record.get("perf/step_time", math.nan) for record in train]
        tokens = [s * record.get("perf/tokens_per_sec", math.nan) for s, record in zip(seconds, train)]
        axes |= {"tokens": _running(tokens, counts), "seconds": _running(seconds, counts)}
    else:
        seconds = [record.get("iteration-time", math.nan) for record in train]
        axes["seconds"] = _running(seconds, counts)
        if kind == "sft":
            axes["tokens"] = _running([record.get("tokens", math.nan) for record in train], counts)
        else:
            axes["tokens"] = [record.get("consumed-tokens", math.nan) for record in train]
            rates = [r.get("throughput", math.nan) * 1e12 * r.get("world-size", 1) for r in train]
            axes["FLOPs"] = _running([s * rate for s, rate in zip(seconds, rates)], counts)
    # A part of the records may lack what an axis needs (another version's log): then it has no place.
    return {name: axes[name] for name in AXES if name in axes and not numpy.isnan(axes[name]).any()}


def _running(per_step: list[float], counts: numpy.ndarray) -> list[float]:
    """Sum up to each record, which speaks for the `counts` steps since the one before."""
    return numpy.cumsum(numpy.asarray(per_step) * counts).tolist()


def _stages(train: list[Record]) -> list[Stage]:
    ends: dict[int, int] = {}
    for record in train:
        if "est-stage" in record:
            ends[int(record["est-stage"])] = int(record["est-stage-end"])
    stages, start = [], 0
    for number, end in sorted(ends.items()):
        stages.append(Stage(number=number, start=start, end=end))
        start = end
    return stages


def _name(path: Path, folder: Path, *, alone: bool) -> str:
    """The run's folder; below a folder of several runs, the way there."""
    home = path.parent.parent if path.parent.name == "logs" else path.parent
    if alone or home == folder:
        return home.resolve().name
    return home.relative_to(folder).as_posix() if home.is_relative_to(folder) else home.name


def _tell_apart(runs: list[Run]) -> None:
    """Give runs of one name the path of each."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.log_dir.parent if run.log_dir.name == "logs" else run.log_dir)
