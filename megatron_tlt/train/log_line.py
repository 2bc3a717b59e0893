"""What a run prints: Megatron's log line with its names, plus tokens/s, MFU and the time left."""

import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from megatron_tlt.train.step import StepResult


@dataclass(kw_only=True, slots=True)
class Interval:
    """Steps since the last log line. A NaN or infinite loss makes the mean so: it is never left out."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    """Of the work that was done: a subnet costs less than the model."""

    def add(self, result: StepResult, *, seconds: float, tokens: int, flops_per_token: float) -> None:
        self.losses.append(result.loss)
        self.grad_norms.append(result.grad_norm)
        self.seconds += seconds
        self.tokens += tokens
        self.flops += tokens * flops_per_token

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def loss(self) -> float:
        """Mean over the steps, nats per token."""
        return sum(self.losses) / self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Throughput of an interval over all ranks. MFU is a fraction of the peak of `world_size` devices."""

    seconds_per_iteration: float
    tokens_per_second: float
    tflops_per_device: float
    """Of the work done."""
    dense_tflops_per_device: float
    """That dense steps over the same tokens in the same time would have done."""
    mfu: float


def measure_speed(
    interval: Interval, *, dense_flops_per_token: float, world_size: int, peak_flops: float
) -> Speed:
    tokens_per_second = interval.tokens / interval.seconds
    per_device = interval.flops / interval.seconds / world_size
    return Speed(
        seconds_per_iteration=interval.seconds / interval.steps,
        tokens_per_second=tokens_per_second,
        tflops_per_device=per_device / 1e12,
        dense_tflops_per_device=tokens_per_second * dense_flops_per_token / world_size / 1e12,
        mfu=per_device / peak_flops,
    )


def training_line(metrics: dict[str, float], *, iteration: int, train_iters: int) -> str:
    """The line of one interval from its metrics (`training_metrics`)."""
    m = metrics
    left = timedelta(seconds=round((train_iters - iteration) * m["iteration-time"]))
    parts = [
        f"iteration {iteration:8d}/{train_iters:8d}",
        f"consumed samples: {m['consumed-samples']:12d}",
        f"elapsed time per iteration (ms): {m['iteration-time'] * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {m['throughput']:.3f}",
        f"learning rate: {m['learning-rate']:.6E}",
        f"global batch size: {m['batch-size']:5d}",
        f"lm loss: {m['lm loss']:.6E}",
        f"grad norm: {m['grad-norm']:.3f}",
        f"number of skipped iterations: {m['skipped-iterations']:3d}",
        f"number of nan iterations: {m['nan-iterations']:3d}",
        f"number of nan grad norms: {m['nan-grad-norms']:3d}",
        f"tokens/s: {m['tokens-per-second']:.0f}",
        f"MFU: {m['mfu'] * 100:.1f}%",
        f"ETA: {left}",
    ]
    if "est-stage" in m:
        parts += _subnet_parts(m)
    return f" [{datetime.now()}] " + " | ".join(parts) + " |"


def _subnet_parts(m: dict[str, float]) -> list[str]:
    return [
        f"stage: {m['est-stage']}",
        f"subnet: {m['est-layers']:.3f} layers {m['est-heads']:.3f} heads {m['est-mlp']:.3f} mlp",
        f"dense-equivalent (TFLOP/s/GPU): {m['throughput-dense-equivalent']:.3f}",
        f"FLOPs saved: {m['est-saving-total']:.1%}",
        f"clipped: {m['est-clip-fraction']:.1%}",
    ]


def stage_line(row: dict[str, float], *, last_stage: int) -> str:
    """What a stage did (`RunStats.rows`), its step time against that of `last_stage`."""
    parts = [
        f"stage {row['stage']}: {row['steps']} steps",
        f"FLOPs per token: {row['flops']:.3f} of dense",
        f"step time per token (us): {row['seconds_per_token'] * 1e6:.2f}",
        f"over stage {last_stage}'s: predicted {row['predicted']:.3f} measured {row['measured']:.3f}",
        f"grad norm: {row['grad_norm']:.3f}",
        f"clipped: {row['clip_fraction']:.1%}",
    ]
    return " " + " | ".join(parts) + " |"


def validation_line(loss: float, *, iteration: int, train_iters: int, tokens: int) -> str:
    return (
        f" validation loss at iteration {iteration}/{train_iters} | lm loss value: {loss:.6E} | "
        f"lm loss PPL: {perplexity(loss):.6E} | tokens: {tokens} |"
    )


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20) as Megatron does; NaN stays NaN."""
    return math.exp(min(20.0, loss)) if math.isfinite(loss) else loss
