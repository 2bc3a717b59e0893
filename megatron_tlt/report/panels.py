"""Which charts a report has: tables of metrics by kind of run, filled with the runs that have them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tlt.report.run import Kind, Run

TITLES: dict[Kind, str] = {"pretrain": "Pretraining", "sft": "Fine-tuning", "rl": "Reinforcement learning"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """What a chart shows. Example: Chart(title="MFU", unit="fraction", train=(("mfu", ""),))."""

    title: str
    unit: str
    train: tuple[tuple[str, str], ...] = ()
    """Metrics of training records, and what the legend says after the run's name."""
    evaluation: tuple[tuple[str, str], ...] = ()
    """The same of evaluations, drawn with markers; a name that begins with "*" takes all with that part."""
    log: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart."""

    run: int
    """Number of the run among those of the report: its colour."""
    name: str
    x: dict[str, list[float]]
    """Axis -> values."""
    y: list[float]
    style: int
    """Number of the metric in the chart: its dash."""
    markers: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A chart with its lines."""

    chart: Chart
    series: list[Series]


CHARTS: dict[Kind, tuple[Chart, ...]] = {
    "pretrain": (
        Chart(title="Loss: subnet in training, full model in validation", unit="nats per token",
              train=(("lm loss", "training"),), evaluation=(("lm loss validation", "validation"),)),
        Chart(title="Tokens per second, all ranks", unit="tokens/s", train=(("tokens-per-second", ""),)),
        Chart(title="Throughput per device", unit="TFLOP/s",
              train=(("throughput", "done"), ("throughput-dense-equivalent", "dense-equivalent"))),
        Chart(title="Model FLOPs utilisation", unit="fraction of peak", train=(("mfu", ""),)),
        Chart(title="Subnet", unit="fraction of the model",
              train=(("est-layers", "layers"), ("est-heads", "heads"), ("est-mlp", "MLP"))),
        Chart(title="FLOPs saved so far", unit="fraction of dense",
              train=(("est-saving-total", "in all"), ("est-saving-layers", "layers only"))),
        Chart(title="Gradient norm", unit="", train=(("grad-norm", ""),), log=True),
        Chart(title="Learning rate", unit="", train=(("learning-rate", ""),)),
    ),
    "sft": (
        Chart(title="Loss per response token", unit="nats per token",
              train=(("lm loss", "training"),), evaluation=(("lm loss validation", "validation"),)),
        Chart(title="Gradient norm", unit="", train=(("grad-norm", ""),), log=True),
        Chart(title="Learning rate", unit="", train=(("learning-rate", ""),)),
        Chart(title="Step time", unit="s", train=(("iteration-time", ""),)),
    ),
    "rl": (
        Chart(title="Reward", unit="per response",
              train=(("rollout/raw_reward", "reward"), ("rollout/pass_rate", "pass rate"))),
        Chart(title="Held-out pass@k", unit="fraction of problems", evaluation=(("*-pass@", ""),)),
        Chart(title="Response length", unit="tokens",
              train=(("rollout/response_len/mean", "mean"), ("rollout/response_len/median", "median"),
                     ("rollout/response_len/p90", "p90"), ("rollout/response_len/p99", "p99"),
                     ("rollout/response_len/max", "max"))),
        Chart(title="Log-probability difference of trainer and engine", unit="nats", log=True,
              train=(("train/train_rollout_logprob_abs_diff", "mean"),
                     ("train/train_rollout_logprob_abs_diff_max", "max"))),
        Chart(title="Seconds a step", unit="s",
              train=(("perf/step_time", "step"), ("perf/rollout_time", "generate"),
                     ("perf/reward_time", "reward"), ("perf/log_probs_time", "log-probs"),
                     ("perf/actor_train_time", "update"), ("perf/update_weights_time", "publish"))),
        Chart(title="Tokens per second, whole step", unit="tokens/s", train=(("perf/tokens_per_sec", ""),)),
        Chart(title="Accept length of speculative decoding", unit="tokens per forward",
              train=(("rollout/spec_accept_length", "all drafts"),
                     ("draft/accept_length_trained", "trained drafter"))),
        Chart(title="Drafts of the drafter accepted, by position", unit="share",
              train=(("*draft/accept_position_", ""),)),
        Chart(title="Loss of the drafter", unit="",
              train=(("draft/loss_first", "first update of the step"), ("draft/loss_last", "last update"))),
        Chart(title="Idle time: waited, and used for the drafter", unit="s a step, mean over ranks",
              train=(("ledger/wait", "waited"), ("ledger/train_drafter", "trained the drafter"))),
        Chart(title="Entropy", unit="nats", train=(("train/entropy", ""),)),
        Chart(title="Divergence from the reference", unit="nats", train=(("rollout/kl", ""),)),
        Chart(title="Gradient norm", unit="", train=(("train/grad_norm", ""),), log=True),
        Chart(title="Clipped, truncated and repeated", unit="fraction",
              train=(("train/pg_clipfrac", "clipped"), ("rollout/truncated_ratio", "truncated"),
                     ("rollout/repetition_frac", "repeated"))),
        Chart(title="Prompts by outcome of their responses", unit="fraction of prompts",
              train=(("baseline_reward/pct_1", "all right"), ("baseline_reward/pct_mixed", "mixed"),
                     ("baseline_reward/pct_0", "none right"))),
    ),
}  # fmt: skip


def panels_of(runs: Sequence[Run], kind: Kind) -> list[Panel]:
    """The charts of `kind` that have at least one line from `runs`, all of which keep their number."""
    panels = [Panel(chart=chart, series=_series(runs, kind, chart)) for chart in CHARTS[kind]]
    return [panel for panel in panels if panel.series]


def _series(runs: Sequence[Run], kind: Kind, chart: Chart) -> list[Series]:
    found = []
    for number, run in enumerate(runs):
        if run.kind != kind:
            continue
        style = 0
        for evaluation, wanted in ((False, chart.train), (True, chart.evaluation)):
            for name, label in _matching(run, wanted, evaluation=evaluation):
                x, y = run.series(name, evaluation=evaluation)
                if y:
                    shown = f"{run.name}: {label}" if label else run.name
                    found.append(
                        Series(run=number, name=shown, x=x, y=y, style=style, markers=evaluation)
                    )
                style += 1
    return found


def _matching(
    run: Run, wanted: Sequence[tuple[str, str]], *, evaluation: bool
) -> list[tuple[str, str]]:
    """`wanted` with its patterns replaced by the run's metrics."""
    out = []
    for name, label in wanted:
        if name.startswith("*"):
            names = [n for n in run.names(evaluation=evaluation) if name[1:] in n]
            out += [(n, n.rsplit("/", 1)[-1].replace("_", " ")) for n in names]
        else:
            out.append((name, label))
    return out
