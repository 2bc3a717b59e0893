"""The figures of the EST study: from finished runs to rows, a summary and a plot.

A group is one shape in one regime at one size. In a group each variant stands with the learning rate that
was best for it over the seeds that all its rates have run, and is compared with dense, at dense's best
rate, seed by seed. `flops_to_dense_loss` is where its validation curve (linear between evaluations) first
is at dense's final loss, as a fraction of dense's FLOPs; None when it is not for some seed.

Where tokens are repeated (`limited`) the models overfit, and the final loss says when rather than how well:
there the best loss of each curve counts, which is what stopping at the right moment would have kept, and
`..._to_dense_loss` is the way to dense's best loss over dense's own way there.
"""

import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

_GROUP = ("shape", "regime", "hidden", "layers", "seq", "steps", "global_batch", "dtype")
Group = tuple[object, ...]
BySeed = dict[int, dict]


def grouped(runs: list[dict]) -> dict[Group, dict[str, BySeed]]:
    """group -> variant -> seed -> run, at the learning rate that is best for the variant; only groups that
    have something to compare with dense, or with each other."""
    by_rate: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for run in runs:
        cell = run["cell"]
        group = tuple(cell[name] for name in _GROUP)
        by_rate[group][cell["variant"]][cell["lr"]][cell["seed"]] = run
    return {
        group: {variant: best_rate(rates) for variant, rates in variants.items()}
        for group, variants in by_rate.items()
        if len(variants) > 1
    }


def best_rate(rates: dict[float, BySeed]) -> BySeed:
    """The runs of the learning rate with the least loss (final, or best where tokens are repeated) over the
    seeds that every rate has."""
    common = set.intersection(*(set(seeds) for seeds in rates.values()))

    def mean_loss(seeds: BySeed) -> float:
        return statistics.mean(compared_loss(seeds[seed]) for seed in common or seeds)

    return min(rates.values(), key=mean_loss)


def compared_loss(run: dict) -> float:
    """The loss that stands for a run, nats a token: its best where tokens repeat, else its last."""
    return best_loss(run) if run["cell"]["regime"] == "limited" else final(run)["loss"]


def final(run: dict) -> dict:
    return run["curve"][-1]


def best_loss(run: dict) -> float:
    """The least validation loss of any evaluation."""
    return min(point["loss"] for point in run["curve"])


def reaches(curve: list[dict], loss: float, column: str) -> float | None:
    """Value of `column` where the curve first is at `loss` or below; None if it never is."""
    before = None
    for point in curve:
        if point["loss"] <= loss:
            if before is None:
                return point[column]
            share = (before["loss"] - loss) / (before["loss"] - point["loss"])
            return before[column] + share * (point[column] - before[column])
        before = point
    return None


def row_of(group: Group, variant: str, runs: BySeed, dense: BySeed) -> dict:
    """One variant of one group against dense, over the seeds that both have."""
    seeds = sorted(set(runs) & set(dense))
    pairs = [(runs[seed], dense[seed]) for seed in seeds]
    gaps = [final(ours)["loss"] - final(theirs)["loss"] for ours, theirs in pairs]
    best = [(best_loss(ours), best_loss(theirs)) for ours, theirs in pairs]
    some = pairs[0][0]
    cell = some["cell"]
    row = dict(zip(_GROUP, group)) | {
        "variant": variant, "lr": cell["lr"], "dense_lr": pairs[0][1]["cell"]["lr"], "seeds": len(seeds),
        "parameters": some["parameters"],
        "tokens_per_parameter": round(
            cell["steps"] * cell["global_batch"] * cell["seq"] / some["parameters"], 2
        ),
        "final_loss": _mean([final(ours)["loss"] for ours, _ in pairs]),
        "loss_gap_equal_steps": _mean(gaps),
        "loss_gap_sd": round(statistics.stdev(gaps), 4) if len(gaps) > 1 else None,
        "best_loss": _mean([ours for ours, _ in best]),
        "best_loss_gap": _mean([ours - theirs for ours, theirs in best]),
        "est": cell["est"],
    }  # fmt: skip
    for name, column in (("flops", "flops"), ("seconds", "cpu_s"), ("wall_seconds", "wall_s")):
        row[f"{name}_of_dense"] = _mean([final(x)[column] / final(y)[column] for x, y in pairs])
        row[f"{name}_to_dense_loss"] = _mean(
            [_fraction(ours, theirs, column) for ours, theirs in pairs]
        )
    return row


def _fraction(ours: dict, dense: dict, column: str) -> float | None:
    target, cost = compared_loss(dense), final(dense)[column]
    if dense["cell"]["regime"] == "limited":
        cost = reaches(dense["curve"], target, column)
    where = reaches(ours["curve"], target, column)
    return None if where is None else where / cost


def _mean(values: list[float | None]) -> float | None:
    """None when one of them is."""
    return None if None in values else round(statistics.mean(values), 4)


def summarise(runs: list[dict]) -> tuple[list[dict], dict]:
    """(one row for each group and variant, the figures of the variant that needs the fewest FLOPs)."""
    regimes = sorted({run["cell"]["regime"] for run in runs})
    if len(regimes) > 1:
        raise SystemExit(f"runs of {regimes}, whose losses mean different things: a study each (--name)")
    rows = []
    for group, variants in grouped(runs).items():
        if "dense" in variants:
            rows += [
                row_of(group, variant, by_seed, variants["dense"])
                for variant, by_seed in variants.items()
                if set(by_seed) & set(variants["dense"])
            ]
    if all(row["variant"] == "dense" for row in rows):
        raise SystemExit("nothing to compare: the runs hold no variant beside a dense run of its seed")
    best = best_variant(rows)
    ours = [row for row in rows if row["variant"] == best]
    figures = ("flops_to_dense_loss", "seconds_to_dense_loss", "loss_gap_equal_steps", "best_loss_gap")
    summary = {name: _mean([row[name] for row in ours]) for name in figures} | {
        "variant": best,
        "seeds": min(row["seeds"] for row in ours),
        "groups": len(ours),
        "time": "CPU seconds of one thread over training steps, which other processes move least",
    }
    return rows, summary


def best_variant(rows: list[dict]) -> str:
    """Of the variants that ran in the most groups: the fewest FLOPs to dense's loss, where all reached
    it, else the least loss at equal steps."""
    by_variant = defaultdict(list)
    for row in rows:
        if row["variant"] != "dense":
            by_variant[row["variant"]].append(row)
    most = max(len(x) for x in by_variant.values())
    whole = {variant: x for variant, x in by_variant.items() if len(x) == most}

    def cost(variant: str) -> tuple[bool, float]:
        flops = _mean([row["flops_to_dense_loss"] for row in whole[variant]])
        gap = _mean([row["loss_gap_equal_steps"] for row in whole[variant]])
        return flops is None, gap if flops is None else flops

    return min(whole, key=cost)


def plot(runs: list[dict], path: Path) -> None:
    """Validation loss of the full model against FLOPs and CPU seconds, mean over seeds: a row a group."""
    groups = grouped(runs)
    figure, axes = pyplot.subplots(
        len(groups), 2, figsize=(12, 4 * len(groups)), layout="constrained", squeeze=False
    )
    for (group, variants), pair in zip(groups.items(), axes, strict=True):
        for axis, column, unit in zip(pair, ("flops", "cpu_s"), ("FLOPs", "CPU seconds")):
            for variant, by_seed in variants.items():
                curves = [run["curve"] for run in by_seed.values()]
                points = list(zip(*curves))
                axis.plot(
                    [statistics.mean(p[column] for p in point) for point in points],
                    [statistics.mean(p["loss"] for p in point) for point in points],
                    label=variant, linewidth=2.5 if variant in ("dense", "nested") else 1.0,
                )  # fmt: skip
            named = dict(zip(_GROUP, group))
            axis.set(
                xlabel=unit, ylabel="validation loss (nats per token)",
                title=f"{named['shape']}, {named['regime'].replace('_', ' ')}, width {named['hidden']}, "
                f"{named['steps']} steps",
            )  # fmt: skip
            last = [final(run)["loss"] for x in variants.values() for run in x.values()]
            axis.set_ylim(min(last) - 0.05, min(last) + 1.0)
            axis.grid(alpha=0.3)
        pair[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
