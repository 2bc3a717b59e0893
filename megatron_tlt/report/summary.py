"""The table of a report: what each run came to, in figures."""

import statistics
from collections.abc import Callable, Sequence

from megatron_tlt.report.run import Kind, Run

# Name of the column and its value for a run; None where the run has none.
Column = tuple[str, Callable[[Run], str | None]]


def _first_last(run: Run, name: str, *, evaluation: bool, form: str) -> str | None:
    _, y = run.series(name, evaluation=evaluation)
    if not y:
        return None
    return f"{y[0]:{form}} → {y[-1]:{form}}" if len(y) > 1 else f"{y[0]:{form}}"


def _median(run: Run, name: str, form: str) -> str | None:
    _, y = run.series(name)
    return f"{statistics.median(y):{form}}" if y else None


def _end(run: Run, axis: str, form: str) -> str | None:
    values = run.axes.get(axis)
    return f"{values[-1]:{form}}" if values else None


def _passes(run: Run) -> str | None:
    names = [name for name in run.names(evaluation=True) if name.endswith("-pass@1")]
    parts = [_first_last(run, name, evaluation=True, form=".3f") for name in names]
    return "; ".join(part for part in parts if part) or None


def _largest(run: Run, name: str, form: str) -> str | None:
    _, y = run.series(name)
    return f"{max(y):{form}}" if y else None


def _saved(run: Run) -> str | None:
    _, y = run.series("est-saving-total")
    return f"{y[-1]:.1%}" if y else None


_COMMON: tuple[Column, ...] = (
    ("steps", lambda run: _end(run, "steps", ".0f")),
    ("tokens", lambda run: _end(run, "tokens", ",.0f")),
    ("seconds in steps", lambda run: _end(run, "seconds", ",.0f")),
)
_TRAINING: tuple[Column, ...] = (
    ("training loss", lambda run: _first_last(run, "lm loss", evaluation=False, form=".4f")),
    ("validation loss", lambda run: _first_last(run, "lm loss validation", evaluation=True, form=".4f")),
)
COLUMNS: dict[Kind, tuple[Column, ...]] = {
    "pretrain": _COMMON + (
        ("FLOPs", lambda run: _end(run, "FLOPs", ".3e")),
        ("FLOPs saved", _saved),
        *_TRAINING,
        ("tokens/s, median", lambda run: _median(run, "tokens-per-second", ",.0f")),
        ("MFU, median", lambda run: _median(run, "mfu", ".1%")),
    ),
    "sft": _COMMON + _TRAINING,
    "rl": _COMMON + (
        ("reward", lambda run: _first_last(run, "rollout/raw_reward", evaluation=False, form=".3f")),
        ("held-out pass@1", _passes),
        ("mean length", lambda run: _first_last(
            run, "rollout/response_len/mean", evaluation=False, form=".0f")),
        ("largest log-prob difference", lambda run: _largest(
            run, "train/train_rollout_logprob_abs_diff_max", ".1e")),
        ("step, median s", lambda run: _median(run, "perf/step_time", ".2f")),
        ("generate, median s", lambda run: _median(run, "perf/rollout_time", ".2f")),
        ("accept length, median", lambda run: _median(run, "rollout/spec_accept_length", ".2f")),
    ),
}  # fmt: skip


def table_of(runs: Sequence[Run], kind: Kind) -> tuple[list[str], list[list[str]]]:
    """(head, one row a run of `kind`); columns that no run fills are left out."""
    chosen = [run for run in runs if run.kind == kind]
    head, columns = ["run"], [[run.name for run in chosen]]
    for name, value in COLUMNS[kind]:
        cells = [value(run) for run in chosen]
        if any(cell is not None for cell in cells):
            head.append(name)
            columns.append([cell or "" for cell in cells])
    return head, [list(row) for row in zip(*columns)]


def as_text(head: list[str], rows: list[list[str]]) -> str:
    """The table for a terminal."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in [head, *rows]
    )


def rl_figures(runs: Sequence[Run]) -> dict[str, float]:
    """Of the RL runs together (seeds of one experiment): pass@1 of their first held-out set before and after,
    as means and as the extremes after, and the largest log-probability difference of trainer and engine.
    What they do not have is absent."""
    chosen = [run for run in runs if run.kind == "rl"]
    passes = [p for p in map(_held_out_passes, chosen) if p]
    figures: dict[str, float] = {}
    if passes:
        before, after = [p[0] for p in passes], [p[-1] for p in passes]
        figures |= {
            "pass_before": statistics.mean(before), "pass_after": statistics.mean(after),
            "pass_after_lowest": min(after), "pass_after_highest": max(after), "rl_runs": len(passes),
        }  # fmt: skip
    differences = [d for run in chosen for d in run.series("train/train_rollout_logprob_abs_diff_max")[1]]
    return figures | ({"max_logprob_diff": max(differences)} if differences else {})


def _held_out_passes(run: Run) -> list[float]:
    name = next((name for name in run.names(evaluation=True) if name.endswith("-pass@1")), None)
    return [] if name is None else run.series(name, evaluation=True)[1]
