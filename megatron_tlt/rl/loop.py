"""The RL loop, synchronous and colocated: every rank generates, then every rank trains."""

import time
from dataclasses import replace
from pathlib import Path

from megatron_tlt.rl.batch import BatchLayout, build_train_batch
from megatron_tlt.rl.dump import Sample, read_dump, write_dump
from megatron_tlt.rl.generation import Collection
from megatron_tlt.rl.metrics import (
    ledger_metrics,
    length_metrics,
    repetition_fraction,
    reward_metrics,
    speculation_metrics,
)
from megatron_tlt.rl.probe import probe
from megatron_tlt.rl.run_log import RlLogger
from megatron_tlt.rl.setup import REFERENCE, RlRun, state_to_save
from megatron_tlt.train.checkpoint import (
    STATE_FILE,
    TrainState,
    iteration_folder,
    save_checkpoint,
)
from megatron_tlt.train.optimizer import gathered_parameters
from megatron_tlt.train.stop import Interrupted, StopRequests

import torch.distributed as dist

Metrics = dict[str, float]


def train(run: RlRun, *, stop: StopRequests | None = None) -> TrainState:
    """Train from `run.state` to the last step, or until `stop` has a reason; returns the final state.

    A signal ends a rollout where it stands: the step is not counted and comes again. Every rank calls it.
    Raises VerifierError, MismatchError, NonFiniteUpdateError or MemoryBudgetError on every rank.
    """
    stop = stop or StopRequests()
    stop.limit(run.config.training.exit_duration_in_mins)
    for collects in filter(None, (run.collector, run.evaluator)):
        collects.generator.stop = stop
    logger = RlLogger(run.config, run.parallel, run.state)
    try:
        try:
            _steps(run, stop, logger)
        except Interrupted:
            run.saver.finish()
            if not _is_saved(run):
                save(run, logger)
        run.saver.finish()
    finally:
        run.clock.timeline.flush()
        logger.close()
        run.close()
    return run.state


def _steps(run: RlRun, stop: StopRequests, logger: RlLogger) -> None:
    """Raises Interrupted, with the run as it was after its last step, for a signal while it generates."""
    state, training = run.state, run.config.training
    publish(run)
    logger.probe(probe(run))
    if state.iteration == 0 and run.config.evaluation.before_training:
        logger.evaluation(evaluate(run))
    while state.iteration < training.train_iters:
        logger.step(_step(run, logger))
        last = state.iteration == training.train_iters
        if last or _is_multiple(state.iteration, run.config.evaluation.interval):
            logger.evaluation(evaluate(run))
        run.clock.timeline.flush()
        run.saver.poll()
        leave = stop.poll() is not None
        if last or leave or _is_multiple(state.iteration, run.config.checkpoint.save_interval):
            save(run, logger)
        if leave:
            return


def _step(run: RlRun, logger: RlLogger) -> Metrics:
    began = time.perf_counter()
    run.clock.timeline.begin_step(run.state.iteration + 1)
    collected = generate(run)
    metrics = rollout_metrics(collected)
    trains = not run.config.debug_rollout_only
    if trains:
        metrics |= update(run, collected.samples)
    advance(run, collected.samples)
    if trains:
        metrics |= publish(run)
    if metrics.get("draft/alarm"):
        length = metrics["draft/accept_length_trained"]
        logger.say(f" warning: the drafter's guesses bring {length:.2f} tokens a verification only")
    return metrics | timing(run, collected.samples, time.perf_counter() - began)


def _is_saved(run: RlRun) -> bool:
    """Whether this very step is in the folder of the checkpoints."""
    root = run.config.checkpoint.save
    return root is not None and (iteration_folder(Path(root), run.state.iteration) / STATE_FILE).is_file()


def generate(run: RlRun) -> Collection:
    """The next step's prompts, their responses and rewards; or those of a dump."""
    step = run.state.iteration + 1
    if run.collector is None:
        with run.clock("reward"):
            samples = read_dump(run.config.load_debug_rollout_data, step)
        return Collection(samples=samples, drops={}, num_rounds=0)
    cursor = run.cursor.state_dict()
    try:
        collected = run.collector.collect(step=step)
    except Interrupted:  # these prompts come again
        run.cursor.load_state_dict(cursor)
        raise
    folder = run.config.save_debug_rollout_data
    if folder is not None and run.parallel.rank == 0:
        write_dump(folder, step, collected.samples)
    return collected


def update(run: RlRun, samples: list[Sample]) -> Metrics:
    """Old and reference log-probabilities, advantages, optimizer updates."""
    config, trainer = run.config, run.trainer
    layout = BatchLayout(
        global_batch_size=config.global_batch_size,
        max_tokens=config.training.max_tokens_per_gpu,
        max_response_len=config.rollout.max_response_len,
        skip_zero_advantage=config.training.skip_zero_advantage,
    )
    with run.clock("log_probs"):
        batch = build_train_batch(samples, config.algorithm, layout, parallel=run.parallel)
        metrics = trainer.score(batch)
        metrics |= trainer.fill_advantages(batch)
    with run.clock("update"):
        metrics |= trainer.update(batch)
    return metrics | {
        "perf/num_micro_batches": batch.stats.num_micro_batches,
        "perf/zero_advantage_skipped": batch.num_left_out,
        "perf/packing_fill": batch.stats.fill,
        "perf/packing_imbalance": batch.stats.imbalance,
    }


def advance(run: RlRun, samples: list[Sample]) -> None:
    """Count the step; the reference follows the policy where it is asked to."""
    run.state.iteration += 1
    run.state.consumed_train_samples += len(samples)
    run.state.consumed_train_tokens += sum(
        len(s.rollout.prompt_tokens) + len(s.rollout.tokens) for s in samples
    )
    if _is_multiple(run.state.iteration, run.config.algorithm.ref_update_interval or None):
        run.trainer.refresh_reference()
        run.reference_iteration = run.state.iteration


def publish(run: RlRun) -> Metrics:
    """The policy's weights, versioned by the step count, to every engine; then the drafter, merged."""
    if run.publisher is None:
        return {}
    with run.clock("publish"):
        with gathered_parameters(run.policy.chunks):
            run.publisher.publish(run.engine, version=run.state.iteration)
        return run.drafting.publish()


def evaluate(run: RlRun) -> Metrics:
    """Metrics of the held-out sets; none without sets."""
    return {} if run.evaluator is None else run.evaluator.evaluate()


def save(run: RlRun, logger: RlLogger) -> None:
    """Policy, optimizer, cursors, tuner and drafter; the reference once, in a folder beside the checkpoints.

    With checkpoint.async_save the files are written while the next steps run.
    """
    options = run.config.checkpoint
    if options.save is None or run.config.debug_rollout_only:
        return
    began = time.perf_counter()
    with run.clock("save"), gathered_parameters(run.policy.chunks):
        state = state_to_save(run)
        root = Path(options.save) / REFERENCE
        kept = iteration_folder(root, run.reference_iteration)
        if run.trainer.reference is not None and not (kept / STATE_FILE).is_file():
            there = replace(state, iteration=run.reference_iteration)
            save_checkpoint(root, there, run.trainer.reference, None, groups=run.parallel.groups)
        run.saver.save(
            state, run.policy.model, run.policy.optimizer, extra=run.drafting.tensors()
        )
    logger.saved(options.save, time.perf_counter() - began)


def rollout_metrics(collected: Collection) -> Metrics:
    """What was generated, under the names that users chart."""
    samples = collected.samples
    counted = [s.usable and len(s.rollout.tokens) > 0 for s in samples]
    metrics = length_metrics([len(s.rollout.tokens) for s in samples], [s.truncated for s in samples])
    metrics |= reward_metrics(
        [s.reward.score for s in samples], [s.group for s in samples], counted=counted
    )
    metrics |= speculation_metrics([s.rollout for s in samples])
    repeated = [repetition_fraction(s.rollout.tokens) for s in samples]
    metrics["rollout/repetition_frac"] = sum(repeated) / max(len(repeated), 1)
    verdicts = [s.reward.verdict for s, counts in zip(samples, counted, strict=True) if counts]
    metrics["rollout/pass_rate"] = sum(v >= 1.0 for v in verdicts) / max(len(verdicts), 1)
    metrics["rollout/verifier_errors"] = sum(bool(s.reward.error) for s in samples)
    metrics["rollout/num_gen_batches"] = collected.num_rounds
    for reason, count in collected.drops.items():
        metrics[f"rollout/dynamic_filter/drop_{reason}"] = count
    return metrics


def timing(run: RlRun, samples: list[Sample], seconds: float) -> Metrics:
    """Seconds and peak memory of the step's phases, where all ranks' seconds went, and tokens per second of
    the whole step; collective over the world."""
    spent, peaks = run.clock.take()
    names = {
        "generate": "rollout_time",
        "reward": "reward_time",
        "log_probs": "log_probs_time",
        "update": "actor_train_time",
        "publish": "update_weights_time",
    }
    metrics = {f"perf/{name}": spent.get(phase, 0.0) for phase, name in names.items()}
    metrics |= {f"perf/peak_gib_{phase}": peak / 2**30 for phase, peak in peaks.items()}
    metrics |= ledger_metrics(_of_all_ranks(run.clock.timeline.take()))
    tokens = sum(len(s.rollout.prompt_tokens) + len(s.rollout.tokens) for s in samples)
    return metrics | {"perf/step_time": seconds, "perf/tokens_per_sec": tokens / seconds}


def _is_multiple(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def _of_all_ranks(mine: object) -> list:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
