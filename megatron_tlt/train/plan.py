"""What `--dry_run` prints: layout, parameters, memory and FLOPs, before anything is built."""

from statistics import fmean

from megatron_tlt import device
from megatron_tlt.subnet.flops import describe_stages
from megatron_tlt.subnet.micro_batch import micro_batch_size
from megatron_tlt.subnet.schedule import Schedule
from megatron_tlt.train.config import PretrainConfig
from megatron_tlt.train.estimate import (
    activation_bytes,
    count_parameters,
    flops_per_token,
    state_bytes,
)

_GIB = 2**30


def describe_plan(config: PretrainConfig, *, vocab_size: int, world_size: int) -> str:
    """Several lines of text; memory is an estimate, parameters and FLOPs are exact."""
    model, parallel, training = config.model, config.parallel, config.training
    padded = model.padded_vocab_size(vocab_size, parallel.tensor_model_parallel_size)
    counts = count_parameters(model, padded_vocab_size=padded)
    data_parallel = parallel.data_parallel_size(world_size)
    batch = training.global_batch_size
    per_token = flops_per_token(model, padded_vocab_size=padded)
    tokens = batch * model.seq_length
    samples = config.batch_schedule(world_size).samples_after(training.train_iters)
    lines = [
        f" layout: {world_size} ranks = tensor {parallel.tensor_model_parallel_size} x pipeline "
        f"{parallel.pipeline_model_parallel_size} (virtual {parallel.num_model_chunks}) x data "
        f"{data_parallel}, {device.backend()} on {device.describe()}",
        f" batch: {batch} samples x {model.seq_length} tokens = {tokens} tokens per step, "
        f"{batch // (training.micro_batch_size * data_parallel)} micro-batches of "
        f"{training.micro_batch_size} per rank",
        f" vocabulary: {vocab_size} padded to {padded}",
        f" parameters: {counts.total:,}",
        f" FLOPs per step: {per_token * tokens:.4e} ({per_token:.4e} per token) of the full model, "
        f"whole run: {per_token * model.seq_length * samples:.4e}",
    ]
    lines += _subnet_lines(config, vocab_size, world_size)
    return "\n".join(lines + _memory_lines(config, padded, data_parallel))


def _subnet_lines(config: PretrainConfig, vocab_size: int, world_size: int) -> list[str]:
    """The stages; rates and layouts that cannot be have been refused before (`PretrainConfig.check`)."""
    if config.est.is_dense:
        return []
    schedule = config.subnet_schedule(world_size, vocab_size=vocab_size)
    lines = describe_stages(
        schedule,
        tensor=config.parallel.tensor_model_parallel_size,
        tokens_after=config.tokens_after(world_size),
    )
    if config.est.micro_batch_per_stage:
        lines += _micro_batch_lines(config, schedule)
    return lines


def _micro_batch_lines(config: PretrainConfig, schedule: Schedule) -> list[str]:
    """Of the stages whose micro-batch is given, and of the next one, to compare with."""
    lines = []
    shown = schedule.stages[: len(config.est.micro_batch_per_stage) + 1]
    for number, stage in enumerate(shown):
        size = micro_batch_size(schedule, number, default=config.training.micro_batch_size)
        activations = activation_bytes(
            config.model,
            config.parallel,
            micro_batch_size=size,
            bf16=config.training.bf16,
            padded_vocab_size=schedule.shape.padded_vocab_size,
            kept=(float(stage.layers), fmean(stage.heads), fmean(stage.mlp)),
        )
        lines.append(
            f" stage {number}: micro-batches of {size}, about {activations / _GIB:.2f} GiB of activations"
        )
    return lines


def _memory_lines(config: PretrainConfig, padded_vocab_size: int, data_parallel: int) -> list[str]:
    model, parallel, training = config.model, config.parallel, config.training
    counts = count_parameters(model, padded_vocab_size=padded_vocab_size)
    shards = data_parallel if config.optimizer.use_distributed_optimizer else 1
    activations = activation_bytes(
        model,
        parallel,
        micro_batch_size=training.micro_batch_size,
        bf16=training.bf16,
        padded_vocab_size=padded_vocab_size,
    )
    lines = []
    for stage in range(parallel.pipeline_model_parallel_size):
        params = counts.on_rank(stage, parallel)
        state = state_bytes(params, bf16=training.bf16, optimizer_shards=shards)
        lines.append(
            f" pipeline stage {stage}: {params:,} parameters per rank; memory about "
            f"{(state + activations) / _GIB:.2f} GiB ({state / _GIB:.2f} weights, gradients and "
            f"optimizer + {activations / _GIB:.2f} activations)"
        )
    available = device.total_memory_bytes() / _GIB
    lines.append(f" memory of this {device.DEVICE_TYPE} device: {available:.1f} GiB")
    return lines
