"""The pretraining loop: step, log, evaluate, save."""

import hashlib
import time
from collections.abc import Iterator

from megatron_tlt import device
from megatron_tlt.data.gpt_dataset import SampleDataset
from megatron_tlt.data.sampler import PretrainSampler, build_batch_iterator
from megatron_tlt.parallel import seed_everything
from megatron_tlt.subnet.stats import StepOutcome
from megatron_tlt.train.checkpoint import TrainState, save_checkpoint
from megatron_tlt.train.optimizer import gathered_parameters
from megatron_tlt.train.run_log import RunLogger
from megatron_tlt.train.setup import PretrainRun
from megatron_tlt.train.step import Batch, StepResult, evaluate, train_step


class NonFiniteError(RuntimeError):
    """Loss or gradient norm is not finite and the policy does not allow going on."""


def pretrain(run: PretrainRun) -> TrainState:
    """Train from `run.state` to the last iteration; returns the final state.

    Every rank calls it. Raises NonFiniteError, on all ranks alike, as `training.nonfinite_policy` says.
    """
    logger = RunLogger(run)
    batches = _train_batches(run)
    training, state = run.config.training, run.state
    skipped_in_a_row = 0
    if state.iteration >= training.train_iters:
        logger.nothing_to_do()
    try:
        while state.iteration < training.train_iters:
            began = time.perf_counter()
            samples = run.batch_size(state.consumed_train_samples)
            result = _step(run, batches, samples)
            skipped_in_a_row = 0 if result.updated else skipped_in_a_row + 1
            seconds = time.perf_counter() - began
            stage_ended = run.subnets.end_step(_outcome(run, result, samples, seconds))
            logger.after_step(result, seconds=seconds, samples=samples)
            _check_finite(run, result, skipped_in_a_row)
            last = state.iteration == training.train_iters
            if last or stage_ended:
                logger.stage_ended()
            leave = _is_multiple(state.iteration, training.exit_interval)
            if last or _is_multiple(state.iteration, training.eval_interval):
                logger.validation(evaluate_run(run))
            if last or leave or _is_multiple(state.iteration, run.config.checkpoint.save_interval):
                logger.saved(save_run(run))
            if leave:
                break
    finally:
        logger.close()
    return state


def _step(run: PretrainRun, batches: Iterator[Batch], samples: int) -> StepResult:
    """One optimizer step and the counting that goes with it."""
    state, parallel = run.state, run.parallel
    run.subnets.begin_step(state.iteration)
    model = run.config.model
    if model.hidden_dropout > 0.0 or model.attention_dropout > 0.0:
        seed_everything(step_seed(state.seed, state.iteration, parallel.dp_rank))
    num = samples // (run.config.training.micro_batch_size * parallel.dp_size)
    target = device.device()
    step_batches = [
        {name: tensor.to(target, non_blocking=True) for name, tensor in next(batches).items()}
        for _ in range(num)
    ]
    result = train_step(run.chunks, run.optimizer, step_batches, parallel=parallel)
    if result.updated:
        run.scheduler.step(increment=samples)
    state.iteration += 1
    state.consumed_train_samples += samples
    state.consumed_train_tokens += samples * model.seq_length
    state.skipped_iterations += not result.updated
    state.nan_iterations += not result.finite_loss
    state.nan_grad_norms += not result.finite_grad_norm
    return result


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


def _check_finite(run: PretrainRun, result: StepResult, skipped_in_a_row: int) -> None:
    if result.updated:
        return
    training = run.config.training
    what = (
        f"iteration {run.state.iteration}: loss {result.loss}, gradient norm {result.grad_norm}; "
        "the update was not made"
    )
    if training.nonfinite_policy == "stop":
        raise NonFiniteError(f"{what} (training.nonfinite_policy=stop)")
    if skipped_in_a_row > training.max_skipped_iterations:
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


def evaluate_run(run: PretrainRun) -> tuple[float, int] | None:
    """(mean loss in nats, tokens) of the full model over the first eval_iters global batches of the
    validation data; None without such data. The same samples each time, so two values differ by the
    weights alone."""
    training = run.config.training
    if run.valid_data is None or training.eval_iters == 0:
        return None
    batches = _validation_batches(run.valid_data, run)
    per_rank = training.global_batch_size // (training.micro_batch_size * run.parallel.dp_size)
    total, tokens = 0.0, 0
    with run.subnets.full_model(), gathered_parameters(run.chunks):
        for _ in range(training.eval_iters):
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


def save_run(run: PretrainRun) -> float | None:
    """Write a checkpoint; returns the seconds it took, or None when nothing is saved."""
    options = run.config.checkpoint
    if options.save is None:
        return None
    began = time.perf_counter()
    run.state.scheduler = run.scheduler.state_dict()
    run.state.est = run.subnets.state_dict()
    with gathered_parameters(run.chunks):
        save_checkpoint(
            options.save,
            run.state,
            run.model,
            run.optimizer,
            groups=run.parallel.groups,
            keep_last=options.keep_last,
        )
    return time.perf_counter() - began
