"""Whether the slices of a subnet fit products that are computed in pieces of fixed length (FP8)."""

from fractions import Fraction

from megatron_tlt.subnet.schedule import Schedule


def check_slices(
    schedule: Schedule, *, alignment: int, reason: str, tensor_model_parallel_size: int
) -> None:
    """Raise ValueError, with the numbers and the remedy, when a TP rank's slice of some stage is no
    multiple of `alignment`; `reason` begins the message. The whole model is checked elsewhere."""
    for stage in schedule.stages:
        for dimension in ("heads", "mlp"):
            for rate in sorted(set(getattr(stage, dimension))):
                sizes = _sizes(schedule, dimension, rate, tensor_model_parallel_size)
                wrong = {name: size for name, size in sizes.items() if size % alignment}
                if rate < 1 and wrong:
                    raise ValueError(
                        f"{reason} multiplies in pieces of {alignment}, which do not divide "
                        + " and ".join(f"{name} = {size}" for name, size in wrong.items())
                        + f" of a subnet with {dimension} at {rate}: {_remedy(dimension, alignment)}"
                    )


def _sizes(
    schedule: Schedule, dimension: str, rate: Fraction, ranks: int
) -> dict[str, int]:
    """Sizes of a TP rank's slices; with draws of varying counts those of one unit."""
    shape, pools = schedule.shape, schedule.pools
    varies = schedule.options.draw == "bernoulli"
    pool = getattr(pools, dimension)
    units = 1 if varies else pool.kept(rate) * pool.strata // ranks
    if dimension == "mlp":
        return {"MLP neurons of a TP rank": units * pools.mlp_block_size}
    d, groups = shape.kv_channels, shape.num_query_groups // ranks
    if pools.gqa_unit == "groups":
        groups, heads = units, units * shape.heads_per_group
    else:
        heads = units
    return {
        "query, key and value rows of a TP rank": (heads + 2 * groups) * d,
        "attention output of a TP rank": heads * d,
    }


def _remedy(dimension: str, alignment: int) -> str:
    if dimension == "mlp":
        return f"set est.mlp_align={alignment}, another rate in est.mlp, or another FP8 recipe"
    return "take another rate in est.heads, or another FP8 recipe"
