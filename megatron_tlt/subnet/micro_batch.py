"""Larger micro-batches in the first stages: a subnet leaves activation memory, and bigger matrix products
run faster. The samples of a step and its gradient, a mean over the global batch, stay as they are."""

from collections.abc import Sequence

from megatron_tlt.subnet.schedule import Schedule


def micro_batch_size(schedule: Schedule, stage: int, *, default: int) -> int:
    """Samples per forward pass of one rank in `stage` (from 0)."""
    sizes = schedule.options.micro_batch_per_stage or []
    return sizes[stage] if stage < len(sizes) else default


def check_micro_batches(
    schedule: Schedule,
    *,
    default: int,
    global_batch_sizes: Sequence[int],
    data_parallel_size: int,
    multiple: int,
) -> None:
    """Raise ValueError for sizes that do not fit; `multiple`: what the micro-batches of a step and rank must
    be divisible by (the pipeline size under the interleaved schedule, else 1)."""
    sizes = schedule.options.micro_batch_per_stage or []
    if len(sizes) > len(schedule.stages):
        raise ValueError(
            f"est.micro_batch_per_stage={sizes} has {len(sizes)} sizes for {len(schedule.stages)} stages"
        )
    for size in sizes:
        if size < 1 or size % default:
            raise ValueError(
                f"est.micro_batch_per_stage={sizes}: {size} is not a multiple of "
                f"training.micro_batch_size={default}"
            )
        for batch in global_batch_sizes:
            if batch % (size * data_parallel_size * multiple):
                raise ValueError(
                    f"est.micro_batch_per_stage={sizes}: global batch size {batch} is not divisible by "
                    f"{size} x data-parallel size {data_parallel_size}"
                    + (f" x {multiple} (interleaved schedule)" if multiple > 1 else "")
                )
