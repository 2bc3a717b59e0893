"""RL: `torchrun --nproc_per_node N -m megatron_tlt.rl --config run.yaml [--key value]`.

Exit codes: 0 done, 2 bad input, 3 a safeguard ended the run (each said in one line), 4 asked to end (SIGTERM,
SIGUSR1 or training.exit_duration_in_mins) and saved: the same command continues, 1 asked to end without
checkpoint.save.
"""

import os
import sys
from collections.abc import Sequence

from megatron_tlt.config import build_parser, parse, to_yaml
from megatron_tlt.data.rewards import VerifierError
from megatron_tlt.entry import EXIT_BAD_INPUT
from megatron_tlt.parallel import init_parallel, shutdown_parallel, world_size_from_env
from megatron_tlt.rl.config import RlConfig
from megatron_tlt.rl.loop import train
from megatron_tlt.rl.metrics import MismatchError
from megatron_tlt.rl.phases import MemoryBudgetError
from megatron_tlt.rl.plan import describe_plan
from megatron_tlt.rl.setup import build_run, find_policy, load_prompt_sets, longest_sequence
from megatron_tlt.rl.trainer import NonFiniteUpdateError
from megatron_tlt.train.stop import EXIT_SAVED, StopRequests

EXIT_STOPPED = 3
EXIT_UNSAVED = 1
_STOPS = (VerifierError, MismatchError, NonFiniteUpdateError, MemoryBudgetError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; see the module's description."""
    stop = StopRequests()
    rank = int(os.environ.get("RANK", "0"))
    parser = build_parser(
        RlConfig,
        prog="python -m megatron_tlt.rl",
        description=__doc__,
        flags={"dry_run": "Check everything, print layout, batches and memory, and exit."},
    )
    try:
        config, flags = parse(parser, RlConfig, arguments)
        config.check(world_size_from_env())
        source, tokenizer = find_policy(config)
        train_set, sets = load_prompt_sets(config, tokenizer)
        longest = longest_sequence(config, source.model, train_set, sets)
    except ValueError as error:
        if rank == 0:  # all ranks read the same input
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    if rank == 0:
        print(to_yaml(config), end="", flush=True)
        plan = describe_plan(
            config,
            source,
            vocab_size=tokenizer.vocab_size,
            num_prompts=len(train_set),
            longest=longest,
            world_size=world_size_from_env(),
        )
        print(plan, flush=True)
    if flags.get("dry_run"):
        return 0
    with stop.listening():
        return _train(config, stop)


def _train(config: RlConfig, stop: StopRequests) -> int:
    parallel = init_parallel(config.parallel, seed=config.training.seed)
    try:
        run = build_run(config, parallel)
    except ValueError as error:
        print(f"error: [rank {parallel.rank}] {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    try:
        state = train(run, stop=stop)
    except _STOPS as error:
        if parallel.is_last_rank:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_STOPPED
    shutdown_parallel()
    if stop.reason is None or state.iteration >= config.training.train_iters:
        return 0
    saved = config.checkpoint.save is not None
    if parallel.is_last_rank:
        kept = "saved; the same command continues" if saved else "nothing saved: no checkpoint.save"
        print(f" ended early: {stop.reason}; {kept}", flush=True)
    return EXIT_SAVED if saved else EXIT_UNSAVED


if __name__ == "__main__":
    sys.exit(main())
