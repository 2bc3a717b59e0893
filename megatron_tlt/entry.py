"""What the command lines that load a model share: parse, join the ranks, act, one line for bad input."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from megatron_tlt.config import build_parser, parse
from megatron_tlt.parallel import Parallel, ParallelConfig, init_parallel, shutdown_parallel

EXIT_BAD_INPUT = 2
EXIT_FILE_VARIABLE = "MEGATRON_TLT_EXIT_FILE"
"""Names the file in which a rank leaves its exit code for the launcher, when it ends as it was asked to."""


class EntryConfig(Protocol):
    """A configuration dataclass with the layout over the ranks."""

    parallel: ParallelConfig


Config = TypeVar("Config", bound=EntryConfig)


def run_entry(
    config_class: type[Config],
    act: Callable[[Config, Parallel], None],
    *,
    prog: str,
    description: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Returns the exit code: 0, or 2 when reading the command line or `act` raised ValueError.

    `act` must raise it on every rank or on none; rank 0 says it in one line.
    """
    parser = build_parser(config_class, prog=prog, description=description)
    try:
        config, _ = parse(parser, config_class, arguments)
        act(config, init_parallel(config.parallel, seed=0))
    except ValueError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    shutdown_parallel()
    return 0
