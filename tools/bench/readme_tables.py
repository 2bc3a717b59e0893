"""README's tables of single results: from the rows of a result file to blocks of Markdown."""

from collections.abc import Callable, Iterable


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0])] + [list(map(str, row)) for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _distinct(values: Iterable) -> list:
    return list(dict.fromkeys(values))


def _size(shape: str) -> tuple[float, str]:
    """Sorts "gpt2-5M" before "gpt2-15M"."""
    kind, _, size = shape.partition("-")
    return float(size.rstrip("M")), kind


def train_table(rows: list[dict]) -> list[str]:
    """Tokens/s by shape and by type and threads."""
    cells = {(r["shape"], r["dtype"], r["threads"]): r for r in rows}
    columns = sorted({key[1:] for key in cells}, key=lambda c: (c[0] == "bf16", c[1]))
    names = {"float32": "fp32", "bfloat16": "bf16"}
    head = [f"{names.get(d, d)}, {t} thread{'s' * (t > 1)}" for d, t in columns]
    lines = []
    for shape in sorted({row["shape"] for row in rows}, key=_size):
        line = [shape]
        for column in columns:
            row = cells.get((shape, *column))
            line.append(f"{row['ours_tokens_per_s']:.0f} ({row['ratio_vs_plain']:.2f})" if row else "")
        lines.append(line)
    steps = [row["steps"] for row in rows]
    least, most = min(steps), max(steps)
    count = f"{least}" if least == most else f"{least} to {most}"
    return [
        f"Training, tokens/s (ratio to the plain twin); {count} steps a cell and side, alternating.",
        _table(["shape", *head], lines),
    ]


def est_speed_table(rows: list[dict]) -> list[str]:
    """Saving of FLOPs and of time by kind of subnet and shape."""
    lines = [
        (r["shape"], r["cell"], f"{r['flops_saved']:.0%}", f"{r['cpu_saved']:.0%}",
         f"{r['realised_cpu']:.2f}")
        for r in rows
    ]
    head = ("shape", "what is drawn at 1/2", "FLOPs saved", "CPU time saved", "time over FLOPs")
    return ["One training step on a subnet against the dense model's.", _table(head, lines)]


def est_curve_table(rows: list[dict]) -> list[str]:
    """Variants by settings: gap to the dense run's validation loss, and the FLOPs it took."""
    columns = ("shape", "hidden", "regime", "steps")
    settings = _distinct(tuple(r[c] for c in columns) for r in rows)
    cells = {(r["variant"], tuple(r[c] for c in columns)): r for r in rows}
    head = [
        f"{shape}, width {hidden}, {regime.replace('_', ' ')}, {steps} steps"
        for shape, hidden, regime, steps in settings
    ]
    lines = []
    for variant in _distinct(r["variant"] for r in rows):
        found = [cells.get((variant, setting)) for setting in settings]
        lines.append([variant, *("" if r is None else _curve_cell(r) for r in found)])
    text = (
        "Validation loss minus the dense run's at equal steps, nats ± standard deviation over seeds (of one "
        "seed none); FLOPs over the dense run's (dense: its loss)."
    )
    if all(r["regime"] == "limited" for r in rows):
        text = (
            "Few tokens over and over: best validation loss of a run minus dense's best; FLOPs of the whole "
            "run over dense's (dense: its best loss)."
        )
    return [text, _table(["variant", *head], lines)]


def _curve_cell(row: dict) -> str:
    limited = row["regime"] == "limited"
    if row["variant"] == "dense":
        return f"{row['best_loss' if limited else 'final_loss']:.3f}"
    if limited:
        return f"{row['best_loss_gap']:+.3f}, {row['flops_of_dense']:.0%}"
    spread = "" if row["loss_gap_sd"] is None else f" ± {row['loss_gap_sd']:.3f}"
    return f"{row['loss_gap_equal_steps']:+.3f}{spread}, {row['flops_of_dense']:.0%}"


def est_trend_table(rows: list[dict]) -> list[str]:
    """How the gap to dense moves with the size of the model and the tokens for each parameter."""
    lines = [
        (r["shape"], r["hidden"], f"{r['parameters'] / 1e6:.1f}M", r["steps"],
         f"{r['tokens_per_parameter']:.2f}", r["seeds"], _curve_cell(r),
         "" if r["flops_to_dense_loss"] is None else f"{r['flops_to_dense_loss']:.0%}")
        for r in sorted(rows, key=lambda r: (r["shape"], r["hidden"], r["steps"]))
        if r["variant"] != "dense"
    ]  # fmt: skip
    head = ("shape", "width", "parameters", "steps", "tokens a parameter", "seeds", "gap at equal steps, "
            "its FLOPs", "FLOPs to dense's loss")  # fmt: skip
    return ["The same against size and length.", _table(head, lines)]


def rollout_table(rows: list[dict]) -> list[str]:
    """Decoding by model and batch size."""
    dtypes = list(rows[0]["off_vs_transformers"])
    head = ["model, batch", *(f"over transformers, {d}" for d in dtypes), "n-grams", "EAGLE", "bandit"]
    lines = [
        [f"{r['model']} ({r['parameters'] / 1e6:.0f}M), {r['batch']}",
         *(f"{r['off_vs_transformers'][d]:.2f}" for d in dtypes),
         *("" if r[name] is None else f"{r[name]:.2f}"
           for name in ("ngram_vs_off", "eagle_vs_off", "bandit_vs_off"))]
        for r in rows
    ]  # fmt: skip
    return [
        "Decoding, tokens/s over `transformers.generate` without speculation, and of speculation over the "
        "fastest setting without.",
        _table(head, lines),
    ]


def strategies_table(rows: list[dict]) -> list[str]:
    """The sweeps of draft trees, each as the paper shows it: accept length and speed-up in a cell."""

    def both(row: dict | None) -> str:
        return "" if row is None else f"{row['accept_length']:.2f}, {row['speedup']:.2f}x"

    def grid(sweep: str, side: str, top: str, corner: str) -> str:
        found = [row for row in rows if row["sweep"] == sweep]
        cells = {(row[side], row[top]): row for row in found}
        columns = sorted({row[top] for row in found})
        lines = [
            [value, *(both(cells.get((value, column))) for column in columns)]
            for value in sorted({row[side] for row in found})
        ]
        return _table((corner, *map(str, columns)), lines)

    topk, batch = (next(r for r in rows if r["sweep"] == name) for name in ("topk", "batch"))
    return [
        "Draft trees of the EAGLE drafter: accept length (bonus token included) and speed over plain "
        f"decoding. One request, {rows[0]['topk']} branches a node:",
        grid("depth", "depth", "verify", "levels \\ tokens to verify"),
        f"Branches a node, one request, {topk['depth']} levels:",
        grid("topk", "batch", "topk", "batch \\ branches"),
        f"Batch sizes, {batch['depth']} levels, {batch['topk']} branches:",
        grid("batch", "verify", "batch", "tokens to verify \\ batch"),
    ]


def rl_table(rows: list[dict]) -> list[str]:
    """Seconds of an RL step by phase."""
    lines = [
        (r["name"], r["steps"], *(f"{r[k]:.2f}" for k in ("step_s", "generate_s", "reward_s", "train_s")),
         f"{r['mean_tokens']:.0f}")
        for r in rows
    ]  # fmt: skip
    head = ("RL step, seconds (medians)", "steps", "step", "generate", "reward", "train", "tokens a response")
    return [_table(head, lines)]


def cluster_table(rows: list[dict]) -> list[str]:
    """Predicted speed-up of rollouts by policy and number of ranks."""
    found = [row for row in rows if row["kind"] == "cluster"]
    cells = {(r["policy"], r["sharing"], r["ranks"]): r["rollout_speedup"] for r in found}
    sizes = sorted({row["ranks"] for row in found})
    lines = [
        [f"{policy}, {sharing}", *(f"{cells[policy, sharing, size]:.2f}x" for size in sizes)]
        for policy, sharing in _distinct((r["policy"], r["sharing"]) for r in found)
    ]
    head = ("speculation, prompts shared by", *(f"{size} ranks" for size in sizes))
    return ["Rollouts on larger clusters, predicted: speed over plain decoding with a static split.",
            _table(head, lines)]  # fmt: skip


TABLES: dict[str, Callable[[list[dict]], list[str]]] = {
    "train": train_table,
    "est_speed": est_speed_table,
    "est_curve": est_curve_table,
    "est_limited": est_curve_table,
    "est_trend": est_trend_table,
    "rollout": rollout_table,
    "strategies": strategies_table,
    "rl": rl_table,
    "cluster_replay": cluster_table,
}
