"""Pretrain: `torchrun --nproc_per_node N -m megatron_tlt.pretrain --config run.yaml [--key value]`."""

import os
import sys
from collections.abc import Sequence

from megatron_tlt.config import build_parser, parse, to_yaml
from megatron_tlt.data.tokenizer import build_tokenizer
from megatron_tlt.entry import EXIT_BAD_INPUT
from megatron_tlt.parallel import init_parallel, shutdown_parallel, world_size_from_env
from megatron_tlt.train.config import PretrainConfig
from megatron_tlt.train.plan import describe_plan
from megatron_tlt.train.pretrain import NonFiniteError, pretrain
from megatron_tlt.train.setup import build_run

EXIT_NONFINITE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for bad input (said in one line), 3 for a non-finite loss."""
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
    return 0 if flags.get("dry_run") else _train(config)


def _train(config: PretrainConfig) -> int:
    parallel = init_parallel(config.parallel, seed=config.training.seed)
    try:
        run = build_run(config, parallel)
    except ValueError as error:
        print(f"error: [rank {parallel.rank}] {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    try:
        pretrain(run)
    except NonFiniteError as error:
        if parallel.is_last_rank:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_NONFINITE
    shutdown_parallel()
    return 0


if __name__ == "__main__":
    sys.exit(main())
