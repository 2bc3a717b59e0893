"""README's measured figures, rendered from tools/bench/results/*.json between two markers.

A figure in README is a figure of a result file: `render` writes the section, and a test fails when the two
differ. A result that does not exist has no rows, and neither has a row whose figures are missing or null.
"""

import json
import re
import shlex
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tools.bench.readme_tables import TABLES

ROOT = Path(__file__).resolve().parent.parent.parent
README, RESULTS = ROOT / "README.md", Path(__file__).parent / "results"
BEGIN = "<!-- measured: begin (python -m tools.bench.all --render) -->"
END = "<!-- measured: end -->"
Result = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of the table; both texts are formatted with the result's summary and `_derived` values."""

    result: str
    what: str
    figure: str


ROWS = tuple(
    Row(result=result, what=what, figure=figure)
    for result, what, figure in (
        ("parity", "largest difference of {layouts_count} layouts (TP2, SP, PP2, VPP2, DP2, distributed and "
         "overlapped, their combinations, recompute) to one process over {steps} steps, fp32",
         "loss {max_loss_diff:.1e} nats, gradient norm {max_grad_norm_diff:.1e}"),
        ("parity", "the same in bf16, relative to fp32 on one process",
         "loss {max_bf16_loss_relative_diff:.1e}, gradient norm {max_bf16_grad_norm_relative_diff:.1e}"),
        ("train", "import to the end of the first step, `tiny` shape, one process", "{startup_s:.1f} s"),
        ("train", "tokens/s over a plain PyTorch twin, median of {rows} cells (smallest, largest)",
         "{median_ratio_vs_plain:.2f} ({min_ratio_vs_plain:.2f}, {max_ratio_vs_plain:.2f})"),
        ("train", "the smallest of any process: cells below 1 were measured in five, the median one counts",
         "{min_ratio_of_any_process:.2f}"),
        ("train", "peak memory over the twin, largest cell", "{max_memory_ratio_vs_plain:.2f}"),
        ("est_curve", "EST (`{variant}`), {groups} shapes, seeds: {seeds}: FLOPs and (indicative) time to "
         "the dense run's last validation loss", "{flops_to_dense_loss:.0%}, {seconds_to_dense_loss:.0%}"),
        ("est_curve", "EST (`{variant}`): validation loss minus the dense run's at equal steps",
         "{loss_gap_equal_steps:+.3f} nats"),
        ("est_limited", "EST (`{variant}`) where few tokens are repeated, {groups} shapes, seeds: {seeds}: "
         "best validation loss minus dense's best", "{best_loss_gap:+.3f} nats"),
        ("est_trend", "EST (`{variant}`), {groups} sizes and lengths: validation loss minus dense's, mean",
         "{loss_gap_equal_steps:+.3f} nats"),
        ("est_speed", "share of the FLOPs that a subnet saves which is saved in time: layers, widths, both",
         "{realised_layers:.0%}, {realised_widths:.0%}, {realised_all:.0%}"),
        ("fp8", "last loss after {steps} steps, FP8 against bf16, mean of {starts} initial weights (largest "
         "standard error {error:.2f} %): mxfp8, blockwise, delayed, tensorwise",
         "{mxfp8:.2f} %, {blockwise:.2f} %, {delayed:.2f} %, {tensorwise:.2f} %"),
        ("fp8_noise", "bf16 runs whose initial weights differ by one rounding lie apart by up to",
         "{max_loss_diff_pct:.1f} %"),
        ("durability", "kills (SIGKILL, SIGTERM, any moment) of a two-rank run: lost, hung; final weights",
         "{kills}: {lost}, {hung}; {equal}"),
        ("durability", "damaged checkpoints: detected", "{corruptions}: {corruptions_detected}"),
        ("checkpoint", "training waits for a save of {parameters_m:.0f}M parameters with Adam's state: "
         "synchronous, asynchronous, asynchronous of selected tensors",
         "{sync_ms:.0f}, {async_ms:.0f}, {selective_ms:.0f} ms"),
        ("lossless", "speculative decoding against plain, fp32, {tests} cases: tokens that differ, of "
         "{tokens_compared:,}", "{different}"),
        ("rollout", "decoding against `transformers.generate`, slowest batch size: the small model, "
         "SmolLM2-135M", "{vs_transformers_small:.2f}x, {vs_transformers_smollm2:.2f}x"),
        ("rollout_sglang", "decoding against SGLang on the CPU, {cells} cells: slowest, median",
         "{vs_sglang_min:.2f}x, {vs_sglang_median:.2f}x"),
        ("rollout", "speculation over the fastest setting without, batch 1: n-grams, EAGLE",
         "{ngram_b1:.2f}x, {eagle_b1:.2f}x"),
        ("rollout", "the bandit over the fastest setting without, worst cell", "{worst_vs_off:.2f}x"),
        ("strategies", "EAGLE trees, one request: fastest (levels, tokens to verify); the longest accept "
         "length and its speed", "{best_speedup:.2f}x ({best_depth}, {best_verify}); {longest_accept:.2f}, "
         "{longest_accept_speedup:.2f}x"),
        ("bandit", "time lost by the bandit against the best static strategy in hindsight, worst cell",
         "{regret:.1%}"),
        ("bandit", "largest error of the replay's predicted time", "{replay_error:.1%}"),
        ("rl", "RL on {cores} cores, time for each generated token, TRL's over ours", "{vs_trl:.2f}x"),
        ("rl", "countdown, held-out pass@1 before and after GRPO, means of {rl_runs} seeds (lowest, highest "
         "after)", "{pass_before:.3f}, {pass_after:.3f} ({pass_after_lowest:.3f}, {pass_after_highest:.3f})"),
        ("rl", "largest log-probability difference of trainer and engine, any token",
         "{max_logprob_diff:.1e}"),
        ("rl", "the whole quickstart", "{quickstart_s:.0f} s"),
        ("tlt", "RL step time without speculation over that with n-grams, a frozen drafter, one trained "
         "in the tail", "{ngram:.2f}x, {frozen:.2f}x, {tlt:.2f}x"),
        ("tlt", "the last one's median over pairs of the same step, and its 95 % interval",
         "{tlt_paired:.2f}x, {tlt_interval[0]:.2f}x to {tlt_interval[1]:.2f}x"),
        ("tlt", "the same, rollout alone, drafter trained in the tail", "{rollout_only:.2f}x"),
        ("tlt", "accept length, drafter frozen and trained", "{accept_frozen:.2f}, {accept_adapted:.2f}"),
        ("tlt", "spot training's share of the critical path", "{spot_overhead:.1%}"),
        ("tlt", "99th percentile of the time to preempt it, in drafter updates",
         "{preempt_p99_over_update:.2f}"),
        ("tlt_short", "the same three where answers are short (18 layers, {steps_a_side} steps a side); "
         "spot training's share", "{ngram:.2f}x, {frozen:.2f}x, {tlt:.2f}x; {spot_overhead:.1%}"),
        ("drafter_curve", "a drafter from nothing, trained in the tails of {steps} RL steps: accept length "
         "at first, after one tail, at the end (the warm one, frozen)", "{accept_nothing:.2f}, "
         "{accept_recovered_first:.2f}, {accept_recovered_last:.2f} ({accept_frozen_last:.2f})"),
        ("drafter_curve", "what an update of the policy takes from it, and what the next tail brings, after "
         "{settled} steps (standard errors)", "{dip:.3f} ({dip_error:.3f}), {recovery:.3f} "
         "({recovery_error:.3f})"),
        ("cluster_replay", "largest error of the replay's time on two ranks, which predicts larger clusters",
         "{validation_error:.1%}"),
        ("sglang", "SGLang suite: tests, failures", "{tests}, {failures}"),
        ("sglang", "accept length in SGLang over that in the embedded engine, same drafter",
         "{accept_ratio_vs_native:.3f}"),
        ("sglang", "new weights ({update_mib:.0f} MiB) into a running SGLang on the CPU by folder, shared "
         "memory, process group", "{update_s_folder:.2f} s, {update_s_tensor:.2f} s, {update_s_group:.2f} s"),
        ("bridge", "SmolLM2-135M: largest logit difference to transformers, fp32; greedy texts equal, of "
         "{greedy_prompts}", "{smollm2_logit_diff:.1e}; {greedy_equal}"),
        ("bridge", "SmolLM2-135M: bits per byte of {kilobytes:.0f} kB of books, ours / transformers",
         "{smollm2_bits_per_byte:.4f} / {transformers_bits_per_byte:.4f}"),
        ("bridge", "peak memory of converting a 1.1B model, larger direction", "{peak_gib_1b:.1f} GiB"),
        ("report", "run report with {events:,} timeline events: size; in Chromium, time to load, to draw a "
         "zoomed timeline (load average of the machine {load_average:.0f})",
         "{file_mib:.1f} MiB, {load_ms:.0f} ms, {zoom_ms:.1f} ms"),
    )
)  # fmt: skip
PLOTS = (("est_curve", "Validation loss against FLOPs and time, EST and its rivals"),
         ("est_limited", "The same where few tokens are repeated"),
         ("rl", "GRPO on countdown, three seeds; the seconds of seeds 1 and 2 were taken beside short tests"),
         ("drafter_curve", "Accept length of a drafter that starts from nothing, over an RL run"),
         ("cluster_replay", "Predicted speed-up of rollouts by number of ranks"),
         ("fp8", "Training loss of each FP8 recipe beside bf16"),
         ("report", "The report's timeline: a made-up step of four ranks, from the benchmark"))  # fmt: skip


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Name -> content of every result file."""
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))}


def _derived(name: str, result: Result) -> dict[str, object]:
    """Figures that a row needs from the rows or in another form."""
    rows, summary = result["rows"], result["summary"]
    if name == "parity":
        return {"steps": rows[0]["steps"], "layouts_count": len(summary["layouts"])}
    if name == "fp8":
        recipes = {row["recipe"]: row["loss_diff_pct"] for row in rows}
        error = max(row["loss_diff_error"] for row in rows)
        return recipes | {"steps": rows[0]["steps"], "starts": rows[0]["starts"], "error": error}
    if name == "durability":
        return {"equal": "bit-equal" if summary["bit_equal"] else "not equal"}
    if name == "checkpoint":
        return {"parameters_m": rows[0]["parameters"] / 1e6}
    if name == "lossless":
        return {"different": sum(row.get("different", 0) for row in rows)}
    if name == "bridge":
        smol = next((row for row in rows if row["name"] == "smollm2-135m"), {})
        return {
            "smollm2_logit_diff": smol.get("max_logit_diff"),
            "greedy_prompts": smol.get("greedy_prompts"), "greedy_equal": smol.get("greedy_equal"),
            "kilobytes": smol.get("num_bytes", 0) / 1e3,
        }  # fmt: skip
    return {}


def _fill(template: str, values: dict[str, object]) -> str | None:
    """None when a value is missing or null."""
    fields = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    names = [name.split("[")[0] for name in fields]
    return None if any(values.get(name) is None for name in names) else template.format(**values)


def _command(result: Result) -> str:
    """The command without what holds on one machine only: output folders, absolute paths."""
    text = re.sub(r" --(output|merge)[ =]\S+", "", result["command"])
    parts = ["PATH" if part.startswith("/") else part for part in shlex.split(text)]
    return shlex.join(parts)


def _figures(results: dict[str, Result]) -> list[str]:
    lines, before = ["| what | figure | command |", "| --- | --- | --- |"], None
    for row in ROWS:
        if row.result not in results:
            continue
        result = results[row.result]
        values = result["summary"] | {"rows": len(result["rows"])} | _derived(row.result, result)
        what, figure = _fill(row.what, values), _fill(row.figure, values)
        if what is None or figure is None:
            continue
        command = "same" if row.result == before else f"`{_command(result)}`"
        lines.append(f"| {what} | {figure} | {command} |")
        before = row.result
    return lines


def _machine(result: Result) -> str:
    machine, versions = result["machine"], result["versions"]
    device = re.sub(r"^CPU | \(\d+ threads?\)", "", machine["device"])
    bf16 = "with native bf16 GEMMs" if machine["native_bf16_gemm"] else "without native bf16 GEMMs"
    return (
        f"{machine['cores']} cores of {device} ({machine['cpu_capability']}, {bf16}), "
        f"{machine['memory_gib']} GiB, torch {versions['torch']}, megatron-core {versions['megatron-core']}"
    )


def _machines(results: dict[str, Result]) -> str:
    """The machine of most results, and the results of others."""
    by_machine = Counter(_machine(result) for result in results.values())
    (most, _), *others = by_machine.most_common()
    text = f"{most}."
    for machine in (machine for machine, _ in others):
        names = ", ".join(f"`{name}`" for name, r in results.items() if _machine(r) == machine)
        text += f" {names}: {machine}."
    return text + " All rows: `tools/bench/results/`."


def section(results: dict[str, Result], *, plots: frozenset[str] = frozenset()) -> str:
    """The Markdown between the markers; `plots`: names of the pictures that exist."""
    blocks = [_machines(results), "\n".join(_figures(results))]
    for name, table in TABLES.items():
        if name in results:
            blocks += table(results[name]["rows"])
    blocks += [f"![{title}](tools/bench/results/{name}.png)" for name, title in PLOTS if name in plots]
    return "\n\n".join(blocks)


def rendered(text: str, results: dict[str, Result], *, plots: frozenset[str] = frozenset()) -> str:
    """README's `text` with the section between the markers renewed. Raises ValueError without markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README lacks the lines {BEGIN!r} and {END!r}: put both where its figures belong")
    return f"{before}{BEGIN}\n\n{section(results, plots=plots)}\n\n{END}{after}"


def existing_plots(folder: Path = RESULTS) -> frozenset[str]:
    return frozenset(path.stem for path in folder.glob("*.png"))
