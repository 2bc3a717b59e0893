"""What a pretraining run is told: the loop's own settings, and all sections together."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_tlt.data.pretrain import DataConfig
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.parallel import ParallelConfig
from megatron_tlt.subnet.alignment import check_slices
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.micro_batch import check_micro_batches
from megatron_tlt.subnet.schedule import Schedule, build_schedule
from megatron_tlt.subnet.shape import ModelShape
from megatron_tlt.train.batch_size import BatchSchedule, build_batch_schedule
from megatron_tlt.train.checkpoint import CheckpointConfig
from megatron_tlt.train.optimizer import OptimizerConfig
from megatron_tlt.train.profiling import ProfilingConfig
from megatron_tlt.train.watchdog import TimeoutConfig

import torch


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """How long, how much at a time, and when to look (Megatron's spelling)."""

    train_iters: int
    """Optimizer steps of the whole run, those before a resume included."""
    global_batch_size: int
    """Samples per step over all ranks."""
    micro_batch_size: int = 1
    """Samples per forward pass of one rank; the rest of the batch is accumulated."""
    rampup_batch_size: list[int] | None = None
    """Batch size ramp-up: start, increment, samples over which it grows to global_batch_size."""
    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    bf16: bool = False
    """Weights and activations in bfloat16, with fp32 master weights and gradient sums; else fp32."""
    eval_interval: int | None = None
    """Steps between evaluations; none: only after the last step."""
    eval_iters: int = 10
    """Global batches per evaluation, the same first ones of the validation split each time; 0: never."""
    nonfinite_policy: Literal["stop", "skip"] = "stop"
    """When loss or gradient norm is NaN or infinite on any rank: end the run before the update, or skip
    the update of that step."""
    max_skipped_iterations: int = 10
    """With skip: this many skipped steps in a row end the run."""
    exit_interval: int | None = None
    """Save and end the run after an iteration that is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and end the run, with exit code 4, after the iteration at which it has run for this long."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Compare the weights of the data-parallel replicas bit by bit every so many iterations; a rank that
    differs ends the run by name."""
    spike_threshold: float = 10.0
    """Report a loss that many deviations above the median of the last 100, with the samples of its step."""

    def __post_init__(self) -> None:
        positive = ("train_iters", "global_batch_size", "micro_batch_size", "max_skipped_iterations")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)} must be at least 1")
        intervals = (
            "eval_interval", "exit_interval", "check_weight_hash_across_dp_replicas_interval"
        )  # fmt: skip
        for name in intervals:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)} must be at least 1")
        for name in ("exit_duration_in_mins", "spike_threshold"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"training.{name}={getattr(self, name)} must be above 0")
        if self.eval_iters < 0:
            raise ValueError(f"training.eval_iters={self.eval_iters} must not be negative")

    @property
    def params_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Where a run's numbers go."""

    log_interval: int = 10
    """Iterations per log line; values are means over them."""
    log_dir: str | None = None
    """Folder of config.yaml, metrics.jsonl and TensorBoard events; default: `logs` in checkpoint.save,
    else `logs` in the current folder."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard events; default: `tensorboard` in log_dir."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device, for MFU; default: the data sheet's, or measured on a CPU."""

    def __post_init__(self) -> None:
        if self.log_interval < 1:
            raise ValueError(f"logging.log_interval={self.log_interval} must be at least 1")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise ValueError(f"logging.peak_tflops={self.peak_tflops} must be above 0")


@dataclass(kw_only=True, slots=True)
class PretrainConfig:
    """A pretraining run. Every key here is a key of the YAML file and of the command line."""

    model: ModelConfig
    """Shape of the model."""
    parallel: ParallelConfig
    """Layout over the ranks."""
    tokenizer: TokenizerConfig
    """Tokenizer."""
    data: DataConfig
    """Training, validation and test data."""
    training: TrainingConfig
    """The loop."""
    est: EstConfig
    """Subnets that grow to the full model (evolving subnetwork training)."""
    precision: PrecisionConfig
    """FP8 of the linear layers."""
    optimizer: OptimizerConfig
    """AdamW, schedules, gradient reduction."""
    checkpoint: CheckpointConfig
    """Saving and resuming."""
    logging: LoggingConfig
    """Log line, metrics files."""
    timeouts: TimeoutConfig
    """How long each phase may take before the run ends and says which rank is late."""
    profiling: ProfilingConfig
    """Profiler window, memory snapshots."""

    def batch_schedule(self, world_size: int) -> BatchSchedule:
        """Checked global batch sizes for that many ranks. Raises ValueError with the numbers."""
        data_parallel_size = self.parallel.data_parallel_size(world_size)
        schedule = build_batch_schedule(
            self.training.global_batch_size,
            self.training.rampup_batch_size,
            micro_batch_size=self.training.micro_batch_size,
            data_parallel_size=data_parallel_size,
        )
        pipeline = self.parallel.pipeline_model_parallel_size
        if self.parallel.num_model_chunks > 1:
            for size in schedule.sizes():
                microbatches = size // (self.training.micro_batch_size * data_parallel_size)
                if microbatches % pipeline:
                    raise ValueError(
                        f"the interleaved schedule needs micro-batches per step divisible by "
                        f"pipeline_model_parallel_size={pipeline}; global batch size {size} gives "
                        f"{microbatches}"
                    )
        return schedule

    def tokens_after(self, world_size: int) -> Callable[[int], int]:
        """Tokens of the first n steps, as a function of n."""
        batches, seq_length = self.batch_schedule(world_size), self.model.seq_length
        return lambda steps: batches.samples_after(steps) * seq_length

    def subnet_schedule(self, world_size: int, *, vocab_size: int) -> Schedule:
        """The subnets of this run. The vocabulary counts for FLOPs alone.

        Raises ValueError, with the nearest legal values, for rates or a layout that cannot be.
        """
        tensor = self.parallel.tensor_model_parallel_size
        schedule = build_schedule(
            self.est,
            ModelShape.of(
                self.model, padded_vocab_size=self.model.padded_vocab_size(vocab_size, tensor)
            ),
            train_iters=self.training.train_iters,
            seed=self.training.seed,
            tokens_after=self.tokens_after(world_size),
        )
        schedule.check_layout(
            tensor=tensor,
            pipeline=self.parallel.pipeline_model_parallel_size,
            virtual=self.parallel.num_model_chunks,
        )
        interleaved = self.parallel.num_model_chunks > 1
        check_micro_batches(
            schedule,
            default=self.training.micro_batch_size,
            global_batch_sizes=self.batch_schedule(world_size).sizes(),
            data_parallel_size=self.parallel.data_parallel_size(world_size),
            multiple=self.parallel.pipeline_model_parallel_size if interleaved else 1,
        )
        if self.precision.fp8 is not None:
            self.precision.check_subnets()
            check_slices(
                schedule,
                alignment=self.precision.recipe.alignment,
                reason=f"precision.fp8_recipe={self.precision.fp8_recipe}",
                tensor_model_parallel_size=tensor,
            )
        return schedule

    def check(self, world_size: int) -> None:
        """All checks that need no process group. Raises ValueError with the numbers."""
        self.batch_schedule(world_size)
        self.model.check_layout(self.parallel)
        self.precision.check_shapes(
            self.model,
            tensor_model_parallel_size=self.parallel.tensor_model_parallel_size,
            micro_batch_size=self.training.micro_batch_size,
        )
        if not self.est.is_dense:
            self.subnet_schedule(world_size, vocab_size=1)
        self.optimizer.schedule_iters(self.training.train_iters)

    @property
    def log_dir(self) -> Path:
        if self.logging.log_dir is not None:
            return Path(self.logging.log_dir)
        return Path(self.checkpoint.save or ".") / "logs"

    @property
    def tensorboard_dir(self) -> Path:
        given = self.logging.tensorboard_dir
        return Path(given) if given is not None else self.log_dir / "tensorboard"
