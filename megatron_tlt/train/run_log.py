"""The log of a pretraining run: lines on the last rank, as Megatron prints them, and metrics files."""

from pathlib import Path

from megatron_tlt import device
from megatron_tlt.config import to_yaml
from megatron_tlt.files import write_text
from megatron_tlt.metrics import JsonlSink, MetricSinks, TensorBoardSink
from megatron_tlt.parallel import Parallel
from megatron_tlt.train.config import PretrainConfig
from megatron_tlt.train.estimate import flops_per_token
from megatron_tlt.train.log_line import (
    Interval,
    Speed,
    measure_speed,
    perplexity,
    stage_line,
    training_line,
    validation_line,
)
from megatron_tlt.train.setup import PretrainRun, peak_flops_per_device
from megatron_tlt.train.step import StepResult

# JSON and TensorBoard keep whole numbers exact below 2**53.
_EXACT = 2**53 - 1


class RunLogger:
    """Prints on the last rank, as Megatron does, and keeps metrics.jsonl and TensorBoard there."""

    def __init__(self, run: PretrainRun) -> None:
        config = run.config
        self._run = run
        self._logs = run.parallel.is_last_rank
        self._interval = Interval()
        self._peak = peak_flops_per_device(config)
        tp = config.parallel.tensor_model_parallel_size
        self._dense_flops = flops_per_token(
            config.model,
            padded_vocab_size=config.model.padded_vocab_size(run.tokenizer.vocab_size, tp),
        )
        self._sinks = MetricSinks(_sinks(config, run.parallel))
        if self._logs:
            write_text(config.log_dir / "config.yaml", to_yaml(config))

    def after_step(self, result: StepResult, *, seconds: float, samples: int) -> None:
        """Count the step; at the end of an interval, or when it was not finite, print and record."""
        self._interval.add(
            result,
            seconds=seconds,
            tokens=samples * self._run.config.model.seq_length,
            flops_per_token=self._run.subnets.flops_per_token,
        )
        state, config = self._run.state, self._run.config
        due = state.iteration % config.logging.log_interval == 0
        if not (due or not result.updated or state.iteration == config.training.train_iters):
            return
        speed = measure_speed(
            self._interval,
            dense_flops_per_token=self._dense_flops,
            world_size=self._run.parallel.world_size,
            peak_flops=self._peak,
        )
        metrics = self._training_metrics(speed, samples)
        self._say(
            training_line(
                metrics, iteration=state.iteration, train_iters=config.training.train_iters
            )
        )
        self._write("train", metrics)
        self._interval = Interval()

    def _training_metrics(self, speed: Speed, batch_size: int) -> dict[str, float]:
        state, groups = self._run.state, self._run.optimizer.param_groups
        return {
            "lm loss": self._interval.loss,
            "grad-norm": self._interval.grad_norms[-1],
            "learning-rate": groups[0]["lr"] if groups else self._run.config.optimizer.lr,
            "batch-size": batch_size,
            "consumed-samples": state.consumed_train_samples,
            "consumed-tokens": state.consumed_train_tokens,
            "skipped-iterations": state.skipped_iterations,
            "nan-iterations": state.nan_iterations,
            "nan-grad-norms": state.nan_grad_norms,
            "data-digest": self._run.guards.digest() & _EXACT,
            "iteration-time": speed.seconds_per_iteration,
            "tokens-per-second": speed.tokens_per_second,
            "throughput": speed.tflops_per_device,
            "throughput-dense-equivalent": speed.dense_tflops_per_device,
            "mfu": speed.mfu,
            "world-size": self._run.parallel.world_size,
            "mem-max-allocated-bytes": device.max_memory_bytes(),
        } | self._run.subnets.metrics()

    def stage_ended(self) -> None:
        """Predicted against measured step time of the stages so far, in the last one's; at the end of the
        run of all, before it of the three newest (a ramp has dozens)."""
        rows = self._run.subnets.stage_rows()
        ended = self._run.state.iteration == self._run.config.training.train_iters
        for row in rows if ended else rows[-3:]:
            self._say(stage_line(row, last_stage=rows[-1]["stage"]))
            stage = row["stage"]
            self._write(
                "stages", {f"est-stage-{stage}-{name}": value for name, value in row.items()}
            )

    def validation(self, result: tuple[float, int] | None) -> None:
        if result is None:
            return
        loss, tokens = result
        iteration, train_iters = self._run.state.iteration, self._run.config.training.train_iters
        self._say(
            validation_line(loss, iteration=iteration, train_iters=train_iters, tokens=tokens)
        )
        metrics = {"lm loss validation": loss, "lm loss validation ppl": perplexity(loss)}
        self._write("validation", metrics)

    def nothing_to_do(self) -> None:
        done, wanted = self._run.state.iteration, self._run.config.training.train_iters
        self._say(f" the checkpoint is at iteration {done} of {wanted}: nothing to do")

    def saved(self, done: tuple[float, Path | None] | None) -> None:
        """A save has begun, ended or both: (seconds that training waited, the checkpoint published)."""
        if done is None:
            return
        seconds, published = done
        if published is not None:
            self._say(f" saved checkpoint {published} (training waited {seconds:.2f} s)")
        self._write("checkpoint", {"save-checkpoint-seconds": seconds})

    def spike(self, text: str | None, *, samples: int) -> None:
        """Report an unusual loss with the samples of its step."""
        if text is None:
            return
        end = self._run.state.consumed_train_samples
        where = f"iteration {self._run.state.iteration}, samples {end - samples} to {end - 1}"
        self._say(f" warning: spiky loss at {where}: {text}")
        self._write("spike", {"first-sample": end - samples, "last-sample": end - 1})

    def trace_written(self, path: Path | None) -> None:
        """On whichever rank has recorded one."""
        if path is not None:
            print(f" profiler trace: {path}", flush=True)

    def _say(self, line: str) -> None:
        if self._logs:
            print(line, flush=True)

    def _write(self, kind: str, metrics: dict[str, float]) -> None:
        state = self._run.state
        self._sinks.write(
            kind, metrics, iteration=state.iteration, samples=state.consumed_train_samples
        )

    def close(self) -> None:
        self._sinks.close()


def _sinks(config: PretrainConfig, parallel: Parallel) -> list:
    if not parallel.is_last_rank:
        return []
    return [JsonlSink(config.log_dir / "metrics.jsonl"), TensorBoardSink(config.tensorboard_dir)]
