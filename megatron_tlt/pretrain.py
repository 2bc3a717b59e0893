"""Pretrain: `torchrun --nproc_per_node N -m megatron_tlt.pretrain --config run.yaml [--key value]`.

Exit codes: 0 finished, or ended at training.exit_interval; 2 bad input (said in one line); 3 a non-finite
loss; 4 ended on SIGTERM, SIGUSR1 or training.exit_duration_in_mins, saved, and continued by the same command;
5 a phase took longer than its limit in `timeouts`; 6 another rank failed. Under torchrun --max_restarts a
rank that ends as it was asked to returns 0, lest it be started again; `megatron_tlt.launcher` returns 4.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.config import build_parser, parse, to_yaml
from megatron_tlt.data.tokenizer import build_tokenizer
from megatron_tlt.entry import EXIT_BAD_INPUT, EXIT_FILE_VARIABLE
from megatron_tlt.parallel import (
    Parallel,
    init_parallel,
    shutdown_parallel,
    world_size_from_env,
    world_store,
)
from megatron_tlt.train.config import PretrainConfig
from megatron_tlt.train.plan import describe_plan
from megatron_tlt.train.pretrain import NonFiniteError, pretrain
from megatron_tlt.train.setup import build_run
from megatron_tlt.train.stop import EXIT_SAVED, StopRequests
from megatron_tlt.train.watchdog import EXIT_LATE, Watchdog

EXIT_NONFINITE = 3
EXIT_UNSAVED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; see the module's description."""
    stop = StopRequests()
    rank = int(os.environ.get("RANK", "0"))
    parser = build_parser(
        PretrainConfig,
        prog="python -m megatron_tlt.pretrain",
        description=__doc__,
        flags={"dry_run": "Check everything, print layout, parameters, memory, FLOPs, and exit."},
    )
    try:
        config, flags = parse(parser, PretrainConfig, arguments)
        config.check(world_size_from_env())
        tokenizer = build_tokenizer(config.tokenizer)
    except ValueError as error:
        if rank == 0:  # all ranks read the same input
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    if rank == 0:
        print(to_yaml(config), end="", flush=True)
        plan = describe_plan(
            config, vocab_size=tokenizer.vocab_size, world_size=world_size_from_env()
        )
        print(plan, flush=True)
    if flags.get("dry_run"):
        return 0
    return train(config, stop)


def train(config: PretrainConfig, stop: StopRequests) -> int:
    """What `main` does once the configuration is read and checked; returns the exit code."""
    with stop.listening():
        return _join_and_run(config, stop)


def _join_and_run(config: PretrainConfig, stop: StopRequests) -> int:
    watchdog = Watchdog(config.timeouts, stacks=config.log_dir / "stacks")
    try:
        parallel = init_parallel(
            config.parallel, seed=config.training.seed, join_seconds=config.timeouts.init
        )
    except (TimeoutError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_LATE
    store = world_store() if parallel.world_size > 1 else None
    watchdog.start(store, rank=parallel.rank, world_size=parallel.world_size)
    try:
        return _run(config, parallel, stop, watchdog)
    except BaseException as error:
        watchdog.fail(error)
        raise
    finally:
        watchdog.close()


def _run(
    config: PretrainConfig, parallel: Parallel, stop: StopRequests, watchdog: Watchdog
) -> int:
    try:
        run = build_run(config, parallel)
    except ValueError as error:
        print(f"error: [rank {parallel.rank}] {error}", file=sys.stderr, flush=True)
        watchdog.fail(error)
        return EXIT_BAD_INPUT
    try:
        state = pretrain(run, stop=stop, watchdog=watchdog)
    except NonFiniteError as error:
        if parallel.is_last_rank:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_NONFINITE
    watchdog.close()
    shutdown_parallel()
    if stop.reason is None or state.iteration >= config.training.train_iters:
        return 0
    return _ended_early(config, parallel, stop.reason)


def _ended_early(config: PretrainConfig, parallel: Parallel, reason: str) -> int:
    saved = config.checkpoint.save is not None
    if parallel.is_last_rank:
        kept = "saved; the same command continues" if saved else "nothing saved: no checkpoint.save"
        print(f" ended early: {reason}; {kept}", flush=True)
    code = EXIT_SAVED if saved else EXIT_UNSAVED
    exit_file = os.environ.get(EXIT_FILE_VARIABLE)
    if exit_file is not None:
        Path(exit_file).write_text(str(code), encoding="utf-8")
        return 0
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return code if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) >= restarts else 0


if __name__ == "__main__":
    sys.exit(main())
