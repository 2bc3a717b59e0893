"""The pretraining loop: step, log, evaluate, save."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.data.gpt_dataset import SampleDataset
from megatron_tlt.data.sampler import PretrainSampler, build_batch_iterator
from megatron_tlt.parallel import seed_everything
from megatron_tlt.subnet.stats import StepOutcome
from megatron_tlt.train.checkpoint import CheckpointSaver, TrainState
from megatron_tlt.train.optimizer import gathered_parameters
from megatron_tlt.train.profiling import StepProfiler, memory_snapshot_on_oom
from megatron_tlt.train.run_log import RunLogger
from megatron_tlt.train.setup import PretrainRun
from megatron_tlt.train.step import Batch, StepResult, evaluate, joined, train_step
from megatron_tlt.train.stop import StopRequests
from megatron_tlt.train.watchdog import Watchdog


class NonFiniteError(RuntimeError):
    """Loss or gradient norm is not finite and the policy does not allow going on."""


def pretrain(
    run: PretrainRun, *, stop: StopRequests | None = None, watchdog: Watchdog | None = None
) -> TrainState:
    """Train from `run.state` to the last iteration, or until `stop` has a reason; returns the final state.

    Every rank calls it. Raises NonFiniteError, on all ranks alike, as `training.nonfinite_policy` says.
    """
    stop, watchdog = stop or StopRequests(), watchdog or Watchdog()
    config, rank = run.config, run.parallel.rank
    stop.limit(config.training.exit_duration_in_mins)
    profiler = StepProfiler(config.profiling, rank=rank, folder=config.log_dir / "profile")
    logger = RunLogger(run)
    if run.state.iteration >= config.training.train_iters:
        logger.nothing_to_do()
    try:
        with memory_snapshot_on_oom(config.profiling, rank=rank, folder=config.log_dir / "memory"):
            with watchdog.phase("step", run.state.iteration):  # what is between the loop's own phases
                _loop(run, logger, profiler, stop=stop, watchdog=watchdog)
    finally:
        logger.trace_written(profiler.close())
        logger.close()
    return run.state


def _loop(
    run: PretrainRun,
    logger: RunLogger,
    profiler: StepProfiler,
    *,
    stop: StopRequests,
    watchdog: Watchdog,
) -> None:
    batches, saver = _train_batches(run), _saver(run)
    training, state = run.config.training, run.state
    skipped_in_a_row = 0
    while state.iteration < training.train_iters:
        began = time.perf_counter()
        logger.trace_written(profiler.before_step(state.iteration))
        samples = run.batch_size(state.consumed_train_samples)
        with watchdog.phase("data", state.iteration):
            step_batches = _take(run, batches, samples)
        with watchdog.phase("step", state.iteration):
            result = _step(run, step_batches, samples)
        skipped_in_a_row = 0 if result.updated else skipped_in_a_row + 1
        seconds = time.perf_counter() - began
        stage_ended = run.subnets.end_step(_outcome(run, result, samples, seconds))
        logger.after_step(result, seconds=seconds, samples=samples)
        _check_finite(run, result, skipped_in_a_row, saver)
        logger.spike(_unusual(run, result), samples=samples)
        last = state.iteration == training.train_iters
        if last or stage_ended:
            logger.stage_ended()
        if last or _is_multiple(state.iteration, training.eval_interval):
            with watchdog.phase("eval", state.iteration):
                logger.validation(evaluate_run(run, stop=stop))
        leave = _is_multiple(state.iteration, training.exit_interval) or stop.poll() is not None
        due = _is_multiple(state.iteration, run.config.checkpoint.save_interval)
        with watchdog.phase("save", state.iteration):
            done = _save_or_poll(run, saver, save=last or leave or due, wait=last or leave)
        logger.saved(done)
        if leave:
            break


def _take(run: PretrainRun, batches: Iterator[Batch], samples: int) -> list[Batch]:
    """The micro-batches of one step, on this rank's device."""
    loaded = run.config.training.micro_batch_size
    num = samples // (loaded * run.parallel.dp_size)
    taken = [next(batches) for _ in range(num)]
    run.guards.data(run.state.iteration, taken)
    size, target = run.subnets.micro_batch_size(run.state.iteration, default=loaded), device.device()
    return [
        {name: tensor.to(target, non_blocking=True) for name, tensor in batch.items()}
        for batch in joined(taken, size // loaded)
    ]


def _step(run: PretrainRun, batches: list[Batch], samples: int) -> StepResult:
    """One optimizer step and the counting that goes with it."""
    state, parallel = run.state, run.parallel
    run.subnets.begin_step(state.iteration)
    model = run.config.model
    if model.hidden_dropout > 0.0 or model.attention_dropout > 0.0:
        seed_everything(step_seed(state.seed, state.iteration, parallel.dp_rank))
    result = train_step(run.chunks, run.optimizer, batches, parallel=parallel)
    if result.updated:
        run.scheduler.step(increment=samples)
    state.iteration += 1
    state.consumed_train_samples += samples
    state.consumed_train_tokens += samples * model.seq_length
    state.skipped_iterations += not result.updated
    state.nan_iterations += not result.finite_loss
    state.nan_grad_norms += not result.finite_grad_norm
    return result


def _unusual(run: PretrainRun, result: StepResult) -> str | None:
    """What the guards say about a step that was made."""
    if not result.updated:
        return None
    parameters = (p for chunk in run.model for p in chunk.parameters())
    return run.guards.step(run.state.iteration, result.loss, parameters)


def _outcome(
    run: PretrainRun, result: StepResult, samples: int, seconds: float
) -> StepOutcome:
    return StepOutcome(
        loss=result.loss,
        grad_norm=result.grad_norm,
        clip_grad=run.config.optimizer.clip_grad,
        tokens=samples * run.config.model.seq_length,
        seconds=seconds,
        updated=result.updated,
    )


def step_seed(seed: int, iteration: int, dp_rank: int) -> int:
    """Seed of a step's dropout: a function of its place alone, so that no RNG state has to be saved and a
    resumed run draws the same masks."""
    text = f"{seed}/{iteration}/{dp_rank}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


def _check_finite(
    run: PretrainRun, result: StepResult, skipped_in_a_row: int, saver: CheckpointSaver | None
) -> None:
    """Raises NonFiniteError as the policy says, after a checkpoint that is being written is published."""
    training = run.config.training
    stops = training.nonfinite_policy == "stop"
    if result.updated or not (stops or skipped_in_a_row > training.max_skipped_iterations):
        return
    if saver is not None:
        saver.finish()
    what = (
        f"iteration {run.state.iteration}: loss {result.loss}, gradient norm {result.grad_norm}; "
        "the update was not made"
    )
    if stops:
        raise NonFiniteError(f"{what} (training.nonfinite_policy=stop)")
    raise NonFiniteError(
        f"{what}, {skipped_in_a_row} times in a row "
        f"(training.max_skipped_iterations={training.max_skipped_iterations})"
    )


def _is_multiple(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def _train_batches(run: PretrainRun) -> Iterator[Batch]:
    if run.state.iteration >= run.config.training.train_iters:
        return iter(())
    sampler = PretrainSampler(
        num_samples=len(run.train_data),
        consumed_samples=run.state.consumed_train_samples,
        micro_batch_size=run.config.training.micro_batch_size,
        data_parallel_rank=run.parallel.dp_rank,
        data_parallel_size=run.parallel.dp_size,
        global_batch_size=run.batch_size,
    )
    return build_batch_iterator(
        run.train_data,
        sampler=sampler,
        num_workers=run.config.data.num_workers,
        pin_memory=device.is_cuda(),
    )


def evaluate_run(
    run: PretrainRun, *, stop: StopRequests | None = None
) -> tuple[float, int] | None:
    """(mean loss in nats, tokens) of the full model over the first eval_iters global batches of the
    validation data; None without such data, and when `stop` has a reason before the end. The same samples
    each time, so two values differ by the weights alone."""
    training = run.config.training
    if run.valid_data is None or training.eval_iters == 0:
        return None
    batches = _validation_batches(run.valid_data, run)
    per_rank = training.global_batch_size // (training.micro_batch_size * run.parallel.dp_size)
    total, tokens = 0.0, 0
    with run.subnets.full_model(), gathered_parameters(run.chunks):
        for _ in range(training.eval_iters):
            if stop is not None and stop.poll() is not None:
                return None
            loss, count = evaluate(
                run.chunks, batches, num_microbatches=per_rank, parallel=run.parallel
            )
            total, tokens = total + loss * count, tokens + count
    return total / max(tokens, 1), tokens


def _validation_batches(data: SampleDataset, run: PretrainRun) -> Iterator[Batch]:
    training = run.config.training
    sampler = PretrainSampler(
        num_samples=len(data),
        consumed_samples=0,
        micro_batch_size=training.micro_batch_size,
        data_parallel_rank=run.parallel.dp_rank,
        data_parallel_size=run.parallel.dp_size,
        global_batch_size=lambda _: training.global_batch_size,
    )
    target = device.device()
    for batch in build_batch_iterator(data, sampler=sampler, num_workers=0):
        yield {name: tensor.to(target) for name, tensor in batch.items()}


def save_run(run: PretrainRun, saver: CheckpointSaver) -> None:
    """Begin to write a checkpoint; it is done when this returns unless checkpoint.async_save is on."""
    run.state.scheduler = run.scheduler.state_dict()
    run.state.est = run.subnets.state_dict()
    run.state.data_digest = run.guards.digest()
    with gathered_parameters(run.chunks):
        saver.save(run.state, run.model, run.optimizer)


def _saver(run: PretrainRun) -> CheckpointSaver | None:
    options = run.config.checkpoint
    if options.save is None:
        return None
    return CheckpointSaver(
        options.save,
        groups=run.parallel.groups,
        keep_last=options.keep_last,
        async_save=options.async_save,
    )


def _save_or_poll(
    run: PretrainRun, saver: CheckpointSaver | None, *, save: bool, wait: bool
) -> tuple[float, Path | None] | None:
    """(seconds that training waited, the checkpoint published by it); None when there was nothing to do."""
    if saver is None or not (save or saver.in_flight):
        return None
    began, before = time.perf_counter(), saver.published
    if save:
        save_run(run, saver)
    else:
        saver.poll()
    if wait:
        saver.finish()
    published = saver.published if saver.published != before else None
    return time.perf_counter() - began, published
