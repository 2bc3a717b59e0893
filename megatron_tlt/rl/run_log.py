"""The log of an RL run: a line a step in Megatron's style on the last rank, and metrics files."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from megatron_tlt.config import to_yaml
from megatron_tlt.files import write_text
from megatron_tlt.metrics import JsonlSink, MetricSinks, TensorBoardSink
from megatron_tlt.parallel import Parallel
from megatron_tlt.rl.config import RlConfig
from megatron_tlt.train.checkpoint import TrainState

# Metric, its name in the line, its format. A metric that a run does not have is left out.
_LINE = (
    ("rollout/raw_reward", "reward", ".4f"),
    ("rollout/pass_rate", "pass rate", ".4f"),
    ("rollout/response_len/mean", "response length mean", ".1f"),
    ("rollout/response_len/max", "max", ".0f"),
    ("rollout/truncated_ratio", "truncated", ".3f"),
    ("train/train_rollout_logprob_abs_diff", "log-prob diff", ".2E"),
    ("rollout/kl", "kl", ".3E"),
    ("train/entropy", "entropy", ".4f"),
    ("train/loss", "loss", ".3E"),
    ("train/pg_clipfrac", "clip fraction", ".4f"),
    ("train/grad_norm", "grad norm", ".3f"),
    ("train/lr", "learning rate", ".3E"),
    ("rollout/spec_accept_length", "accept length", ".2f"),
    ("draft/accept_length_trained", "of the drafter", ".2f"),
    ("draft/loss", "drafter loss", ".3E"),
    ("draft/num_updates", "drafter updates", ".0f"),
    ("perf/rollout_time", "generate (s)", ".2f"),
    ("perf/reward_time", "reward (s)", ".2f"),
    ("perf/log_probs_time", "log-probs (s)", ".2f"),
    ("perf/actor_train_time", "update (s)", ".2f"),
    ("perf/step_time", "step (s)", ".2f"),
    ("perf/tokens_per_sec", "tokens/s", ".0f"),
)


def step_line(metrics: Mapping[str, float], *, iteration: int, train_iters: int) -> str:
    """The line of one step from its metrics."""
    parts = [f"iteration {iteration:6d}/{train_iters:6d}"]
    parts += [f"{name}: {metrics[key]:{form}}" for key, name, form in _LINE if key in metrics]
    left = timedelta(seconds=round((train_iters - iteration) * metrics["perf/step_time"]))
    return f" [{datetime.now()}] " + " | ".join([*parts, f"ETA: {left}"]) + " |"


def evaluation_line(metrics: Mapping[str, float], *, iteration: int) -> str:
    """The line of one evaluation."""
    parts = [f"{name.removeprefix('eval/')}: {value:.4f}" for name, value in metrics.items()]
    return f" evaluation after iteration {iteration} | " + " | ".join(parts) + " |"


class RlLogger:
    """Prints on the last rank, and keeps config.yaml, metrics.jsonl and TensorBoard there."""

    def __init__(self, config: RlConfig, parallel: Parallel, state: TrainState) -> None:
        self._config, self._state = config, state
        self._logs = parallel.is_last_rank
        sinks = []
        if self._logs:
            sinks = [
                JsonlSink(config.log_dir / "metrics.jsonl"),
                TensorBoardSink(config.tensorboard_dir),
            ]
            write_text(config.log_dir / "config.yaml", to_yaml(config))
        self._sinks = MetricSinks(sinks)

    def step(self, metrics: Mapping[str, float]) -> None:
        iteration, train_iters = self._state.iteration, self._config.training.train_iters
        self.say(step_line(metrics, iteration=iteration, train_iters=train_iters))
        self._write("train", metrics)

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        if metrics:
            self.say(evaluation_line(metrics, iteration=self._state.iteration))
            self._write("eval", metrics)

    def probe(self, metrics: Mapping[str, float]) -> None:
        if metrics:
            values = " | ".join(f"{name}: {value:.3g}" for name, value in metrics.items())
            self.say(f" engine probed before the first step | {values} |")
            self._write("probe", metrics)

    def saved(self, folder: str, seconds: float) -> None:
        iteration = self._state.iteration
        self.say(f" saved checkpoint of iteration {iteration} to {folder} in {seconds:.2f} s")
        self._write("checkpoint", {"save-checkpoint-seconds": seconds})

    def say(self, line: str) -> None:
        """Print on the rank that logs."""
        if self._logs:
            print(line, flush=True)

    def _write(self, kind: str, metrics: Mapping[str, float]) -> None:
        state = self._state
        self._sinks.write(
            kind, metrics, iteration=state.iteration, samples=state.consumed_train_samples
        )

    def close(self) -> None:
        self._sinks.close()
