"""A pretraining run put together: model, optimizer, data, and what a checkpoint restores of them."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.data.gpt_dataset import SampleDataset
from megatron_tlt.data.pretrain import build_datasets
from megatron_tlt.data.tokenizer import Tokenizer, build_tokenizer
from megatron_tlt.models.gpt import GPT, build_chunks, model_identity
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.parallel import Parallel, is_local_builder
from megatron_tlt.train.batch_size import BatchSchedule
from megatron_tlt.train.checkpoint import (
    TrainState,
    check_identity,
    check_save_folder,
    find_checkpoint,
    load_checkpoint,
    read_train_state,
)
from megatron_tlt.train.config import PretrainConfig
from megatron_tlt.train.est import Subnets, build_subnets
from megatron_tlt.train.guards import RunGuards
from megatron_tlt.train.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from megatron_tlt.train.step import attach_finalizer

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(kw_only=True, slots=True)
class PretrainRun:
    """Everything that the loop works on."""

    config: PretrainConfig
    parallel: Parallel
    tokenizer: Tokenizer
    batch_size: BatchSchedule
    train_data: SampleDataset
    valid_data: SampleDataset | None
    model: list[GPT]
    """Bare chunks, fp32 or bf16: what a checkpoint holds."""
    chunks: list[DistributedDataParallel]
    """The same, wrapped: what a step runs."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    subnets: Subnets
    """Which part of the model a step trains."""
    state: TrainState
    guards: RunGuards


def build_run(config: PretrainConfig, parallel: Parallel) -> PretrainRun:
    """Build and, with `checkpoint.load`, restore; collective over the world.

    Raises ValueError for bad input before anything large is built.
    """
    config.check(parallel.world_size)
    check_save_folder(config.checkpoint.save)
    checkpoint = find_checkpoint(config.checkpoint)
    tokenizer = build_tokenizer(config.tokenizer)
    saved = _saved_state(checkpoint, config, tokenizer, tells=parallel.rank == 0)
    subnets = build_subnets(config, parallel, vocab_size=tokenizer.vocab_size)
    if saved is not None and not config.checkpoint.finetune:
        subnets.load_state_dict(saved.est)
    batch_size = config.batch_schedule(parallel.world_size)
    train_data, valid_data = _build_data(config, parallel, tokenizer, batch_size)
    model = build_chunks(
        config.model,
        parallel,
        vocab_size=tokenizer.vocab_size,
        params_dtype=config.training.params_dtype,
        layer_spec=_layer_spec(config, subnets),
        precision=config.precision,
    )
    initialize_parameters(model, seed=config.training.seed, vocab_size=tokenizer.vocab_size)
    chunks = wrap_data_parallel(model, config.optimizer, parallel)
    attach_finalizer(chunks, parallel)
    optimizer = build_optimizer(chunks, config.optimizer, parallel)
    subnets.attach(chunks, optimizer)
    run = PretrainRun(
        config=config,
        parallel=parallel,
        tokenizer=tokenizer,
        batch_size=batch_size,
        train_data=train_data,
        valid_data=valid_data,
        model=model,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=build_scheduler(
            optimizer,
            config.optimizer,
            train_iters=config.training.train_iters,
            samples_after=batch_size.samples_after,
        ),
        subnets=subnets,
        state=_fresh_state(config, tokenizer, train_data),
        guards=RunGuards(
            dp_group=parallel.groups.dp,
            data_digest=0 if saved is None or config.checkpoint.finetune else saved.data_digest,
            spike_threshold=config.training.spike_threshold,
            weight_hash_interval=config.training.check_weight_hash_across_dp_replicas_interval,
        ),
    )
    if checkpoint is not None:
        _restore(run, checkpoint, saved)
    return run


def _saved_state(
    checkpoint: Path | None, config: PretrainConfig, tokenizer: Tokenizer, *, tells: bool
) -> TrainState | None:
    """Raises ValueError when the checkpoint is of another model or tokenizer."""
    if checkpoint is None:
        return None
    if tells:
        print(f" resuming from {checkpoint}", flush=True)
    saved = read_train_state(checkpoint)
    check_identity("model", saved.model, model_identity(config.model))
    check_identity("tokenizer", saved.tokenizer, tokenizer.identity())
    return saved


def _layer_spec(config: PretrainConfig, subnets: Subnets) -> Callable[..., ModuleSpec]:
    te = config.precision.uses_transformer_engine
    return subnets.te_layer_spec if te else subnets.layer_spec


def _build_data(
    config: PretrainConfig, parallel: Parallel, tokenizer: Tokenizer, batch_size: BatchSchedule
) -> tuple[SampleDataset, SampleDataset | None]:
    """The validation data is None when no evaluation is asked for or there is no such split."""
    train_data, valid_data, _ = build_datasets(
        config.data,
        tokenizer=tokenizer,
        seq_length=config.model.seq_length,
        num_samples=(
            batch_size.samples_after(config.training.train_iters),
            config.training.eval_iters * batch_size.final,
            0,
        ),
        seed=config.training.seed,
        sync=_WorldSync(
            is_builder=parallel.rank == 0, is_local_builder=is_local_builder(parallel)
        ),
    )
    assert train_data is not None, "build_datasets refuses to go without training data"
    return train_data, valid_data


@dataclass(frozen=True, kw_only=True, slots=True)
class _WorldSync:
    """The index cache's CacheSync over the whole world."""

    is_builder: bool
    is_local_builder: bool

    def barrier(self) -> None:
        dist.barrier()


def _fresh_state(
    config: PretrainConfig, tokenizer: Tokenizer, train_data: SampleDataset
) -> TrainState:
    return TrainState(
        model=model_identity(config.model),
        tokenizer=tokenizer.identity(),
        data=train_data.identity(),
        seed=config.training.seed,
        config=asdict(config),
    )


def _restore(run: PretrainRun, checkpoint, saved: TrainState) -> None:
    """Fill weights, and unless `finetune` optimizer, schedule position and counters.

    The schedule is this run's configuration at the saved position (consumed samples); where the saved
    run's differs, that is said. With no_load_optim the position is kept, only the moments start afresh.
    """
    options = run.config.checkpoint
    with_optimizer = not (options.finetune or options.no_load_optim)
    load_checkpoint(
        checkpoint, run.model, run.optimizer if with_optimizer else None, groups=run.parallel.groups
    )
    if not with_optimizer:
        run.optimizer.reload_model_params()  # the fp32 master weights, where there are any
    if options.finetune:
        return
    fresh = run.state
    if run.parallel.rank == 0:
        _tell_differences("data order", saved.data, fresh.data)
        planned = run.scheduler.state_dict() | {"num_steps": None}
        _tell_differences("schedule", saved.scheduler | {"num_steps": None}, planned)
    run.scheduler.step(increment=int(saved.scheduler["num_steps"]))
    run.state = saved
    run.state.data, run.state.seed, run.state.config = fresh.data, fresh.seed, fresh.config


def _tell_differences(
    what: str, saved: dict[str, object], ours: dict[str, object]
) -> None:
    for name in sorted(set(saved) | set(ours)):
        if saved.get(name) != ours.get(name):
            print(
                f" warning: the {what} differs from the checkpoint's: {name} was "
                f"{saved.get(name)!r}, is {ours.get(name)!r}; the run goes on with the latter",
                file=sys.stderr,
                flush=True,
            )


def peak_flops_per_device(config: PretrainConfig) -> float:
    """FLOP/s of one device against which MFU is stated."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops * 1e12
    return device.peak_flops(config.training.params_dtype)
