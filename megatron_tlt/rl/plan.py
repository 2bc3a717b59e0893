"""What `--dry_run` prints of an RL run: layout, batches, engines and memory, before anything is built."""

from dataclasses import replace

from megatron_tlt import device
from megatron_tlt.bridge.finetune import Source
from megatron_tlt.rl.config import RlConfig
from megatron_tlt.train.estimate import activation_bytes, count_parameters, state_bytes

_GIB = 2**30


def describe_plan(
    config: RlConfig,
    source: Source,
    *,
    vocab_size: int,
    num_prompts: int,
    longest: int,
    world_size: int,
) -> str:
    """Several lines of text; memory is an estimate. `longest`: tokens of the longest prompt and response."""
    parallel, rollout = config.parallel, config.rollout
    data_parallel = parallel.data_parallel_size(world_size)
    engines = world_size // parallel.tensor_model_parallel_size
    padded = source.model.padded_vocab_size(vocab_size, parallel.tensor_model_parallel_size)
    total = count_parameters(source.model, padded_vocab_size=padded).total
    where = source.folder or "random weights"
    steps = max(num_prompts, 1) / rollout.rollout_batch_size
    lines = [
        f" policy: {total:,} parameters from {where} ({'resumed' if source.resumes else 'new run'})",
        f" layout: {world_size} ranks = tensor {parallel.tensor_model_parallel_size} x pipeline "
        f"{parallel.pipeline_model_parallel_size} x data {data_parallel}, {device.backend()} on "
        f"{device.describe()}; {engines} rollout engines of {parallel.tensor_model_parallel_size} ranks",
        f" batch: {rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} responses per step, "
        f"{rollout.num_samples // config.global_batch_size * config.training.num_epochs} updates of "
        f"{config.global_batch_size}; {num_prompts} prompts, {steps:.1f} steps an epoch",
        f" algorithm: {config.algorithm.algorithm}, loss {config.algorithm.loss_agg_mode}, KL in loss "
        f"{config.algorithm.kl_loss_coef}, in reward {config.algorithm.kl_coef}, truncation "
        f"{config.algorithm.truncation}; speculation {config.speculation}",
    ]
    return "\n".join(lines + _memory_lines(config, source, padded, data_parallel, longest))


def _memory_lines(
    config: RlConfig, source: Source, padded: int, data_parallel: int, longest: int
) -> list[str]:
    model, parallel, training = source.model, config.parallel, config.training
    counts = count_parameters(model, padded_vocab_size=padded)
    shards = data_parallel if config.optimizer.use_distributed_optimizer else 1
    activations = activation_bytes(
        replace(model, seq_length=training.max_tokens_per_gpu,
                max_position_embeddings=max(model.max_position_embeddings, training.max_tokens_per_gpu)),
        parallel, micro_batch_size=1, bf16=training.bf16, padded_vocab_size=padded,
    )  # fmt: skip
    width, tp = training.params_dtype.itemsize, parallel.tensor_model_parallel_size
    engine = counts.total // tp * width
    cache = longest * config.rollout.max_running_requests * model.num_layers * width
    cache *= 2 * model.num_query_groups * model.kv_channels // tp
    if config.rollout.kv_cache_gib is not None:
        cache = min(cache, int(config.rollout.kv_cache_gib * _GIB))
    kept = 0 if config.rollout.offloads else cache
    lines = []
    for stage in range(parallel.pipeline_model_parallel_size):
        params = counts.on_rank(stage, parallel)
        state = state_bytes(params, bf16=training.bf16, optimizer_shards=shards)
        state += params * width * config.algorithm.needs_reference
        lines.append(
            f" pipeline stage {stage}: memory about {(state + engine + cache) / _GIB:.2f} GiB while "
            f"generating ({state / _GIB:.2f} training state, {engine / _GIB:.2f} engine weights, "
            f"{cache / _GIB:.2f} key/value cache), {(state + engine + kept + activations) / _GIB:.2f} GiB "
            f"while updating"
        )
    available = device.total_memory_bytes() / _GIB
    return [*lines, f" memory of this {device.DEVICE_TYPE} device: {available:.1f} GiB"]
