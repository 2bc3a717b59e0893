"""Which subnet a step trains: a pure function of (seed, step, global layer, dimension, stratum).

Random numbers come from SHAKE-128 of those coordinates, so there is no generator state: every rank gets
the same plan without talking, under any layout, after any resume. A stratum keeps the units that come
first in a random order, so a count that grows while the order stays (see `resample_interval`) only adds.
"""

import hashlib
import struct
from dataclasses import dataclass
from fractions import Fraction

from megatron_tlt.subnet.schedule import Schedule
from megatron_tlt.subnet.shape import Pool
from megatron_tlt.subnet.stages import Stage

HASH_VERSION = 1
_ALL_LAYERS = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What one layer runs with. Example: heads (0, 3), every MLP block, attention output times 2."""

    layer: int
    """Global, from 0."""
    heads: tuple[int, ...] | None
    """Kept units of the heads pool, ascending, counted over the whole layer; None: all."""
    mlp: tuple[int, ...] | None
    """Kept blocks of neurons, likewise."""
    head_scale: float
    """Factor of the attention's output before its bias."""
    mlp_scale: float
    """Factor of the MLP's output before its bias."""
    bias_scale: float = 1.0
    """Factor of both biases: 1 unless layers are scaled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The subnet of a step; `layers[l]` is None where layer l is skipped."""

    stage: int
    layers: tuple[LayerPlan | None, ...]

    @property
    def num_active_layers(self) -> int:
        return sum(layer is not None for layer in self.layers)

    @property
    def is_full(self) -> bool:
        return all(
            layer is not None and layer.heads is None and layer.mlp is None for layer in self.layers
        )

    def digest(self) -> int:
        """63 bits that differ, but for chance, when two plans differ: compared across ranks."""
        text = repr([HASH_VERSION, self.stage, self.layers])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Steps of one schedule with equal keys have equal plans."""

    stage: int
    draw: int
    step: int = 0


def plan_key(schedule: Schedule, step: int) -> PlanKey:
    """Where `step` stands: its stage and its number of the draw."""
    interval, stage = schedule.options.resample_interval, schedule.stage_index(step)
    if interval == "never":
        number = 0
    elif interval == "stage":
        number = stage
    else:
        number = step // interval
    varying = schedule.layer_keep is not None and schedule.layer_keep.gamma is not None
    return PlanKey(stage, number, step if varying else 0)


def draw_plan(schedule: Schedule, step: int) -> Plan:
    """The plan of `step` (counted from 0)."""
    key = plan_key(schedule, step)
    stage = schedule.stages[key.stage]
    kept, probability = _kept_layers(schedule, key, stage, step)
    layers = tuple(
        _layer_plan(schedule, key, layer, keep=probability[layer]) if layer in kept else None
        for layer in range(schedule.shape.num_layers)
    )
    return Plan(stage=key.stage, layers=layers)


def _layer_plan(schedule: Schedule, key: PlanKey, layer: int, *, keep: float) -> LayerPlan:
    stage = schedule.stages[key.stage]
    heads, head_rate = _draw_width(schedule, key, schedule.pools.heads, layer, stage.heads[layer])
    mlp, mlp_rate = _draw_width(schedule, key, schedule.pools.mlp, layer, stage.mlp[layer])
    scale = 1.0 / keep if schedule.options.layer_scale == "inverse_rate" else 1.0
    scaled = schedule.options.output_scale == "inverse_rate"
    return LayerPlan(
        layer=layer,
        heads=heads,
        mlp=mlp,
        head_scale=scale * (float(1 / head_rate) if scaled else 1.0),
        mlp_scale=scale * (float(1 / mlp_rate) if scaled else 1.0),
        bias_scale=scale,
    )


def _draw_width(
    schedule: Schedule, key: PlanKey, pool: Pool, layer: int, rate: Fraction
) -> tuple[tuple[int, ...] | None, Fraction]:
    """(kept units, rate that the output is divided by): the effective one, or Bernoulli's probability."""
    if rate == 1:
        return None, rate
    options = schedule.options
    where = _ALL_LAYERS if options.shared_draws else layer
    if options.draw == "bernoulli":
        name = _coordinates(schedule, key.draw, where, pool.dimension, "all")
        return tuple(bernoulli(name, pool.total, [float(rate)] * pool.total)), rate
    count = pool.kept(rate)
    units: list[int] = []
    for stratum in range(pool.strata):
        chosen = _draw_stratum(schedule, key, pool, where, stratum, count)
        units += [stratum * pool.size + unit for unit in sorted(chosen)]
    return tuple(units), Fraction(count, pool.size)


def _draw_stratum(
    schedule: Schedule, key: PlanKey, pool: Pool, layer: int | str, stratum: int, count: int
) -> list[int]:
    """`count` of the units of one stratum, numbered inside it."""
    draw, size = schedule.options.draw, pool.size
    if draw == "nested":
        return list(range(count))
    if draw == "rotating":
        return [(key.draw * count + unit) % size for unit in range(count)]
    if draw == "window":
        name = _coordinates(schedule, key.draw, layer, pool.dimension, stratum)
        first = random_keys(name, 1)[0] % size
        return [(first + unit) % size for unit in range(count)]
    return _random(schedule, key, (layer, pool.dimension, stratum), list(range(size)), count)


def _random(
    schedule: Schedule, key: PlanKey, where: tuple, units: list[int], count: int
) -> list[int]:
    """The first `count` units in a random order, or the last ones in every second antithetic draw."""
    antithetic = schedule.options.antithetic
    number = key.draw // 2 if antithetic else key.draw
    keys = random_keys(_coordinates(schedule, number, *where), len(units))
    order = [unit for _, unit in sorted(zip(keys, units))]
    return order[len(order) - count :] if antithetic and key.draw % 2 else order[:count]


def _kept_layers(
    schedule: Schedule, key: PlanKey, stage: Stage, step: int
) -> tuple[set[int], list[float]]:
    """(layers that run, probability with which each one does)."""
    pool, total = schedule.pools.layers, schedule.shape.num_layers
    if schedule.layer_keep is not None:
        rates = [schedule.layer_keep.rate(step, layer, total) for layer in range(total)]
        rates = [1.0 if layer in protected_layers(schedule) else r for layer, r in enumerate(rates)]
        name = _coordinates(schedule, key.draw, _ALL_LAYERS, pool.dimension, "all")
        return set(bernoulli(name, total, rates)), rates
    if stage.layers == 1:
        return set(range(total)), [1.0] * total
    kept: set[int] = set()
    probability = [0.0] * total
    for stratum in range(pool.strata):
        first = stratum * pool.size
        fixed = [x - first for x in protected_layers(schedule) if first <= x < first + pool.size]
        free = [unit for unit in range(pool.size) if unit not in fixed]
        count = pool.kept(stage.layers) - len(fixed)
        chosen = _draw_layers(schedule, key, stratum, free, count)
        kept |= {first + unit for unit in (*fixed, *chosen)}
        for unit in range(pool.size):
            probability[first + unit] = 1.0 if unit in fixed else count / len(free)
    return kept, probability


def _draw_layers(
    schedule: Schedule, key: PlanKey, stratum: int, free: list[int], count: int
) -> list[int]:
    draw = schedule.options.layer_draw or schedule.options.draw
    size = len(free)
    if count in (0, size):
        return free[:count]
    if draw in ("nested", "rotating"):
        spread = evenly_spaced(size, _counts_of(schedule, size))[:count]
        shift = key.draw if draw == "rotating" else 0
        return [free[(unit + shift) % size] for unit in spread]
    where = (_ALL_LAYERS, "layers", stratum)
    if draw == "window":
        first = random_keys(_coordinates(schedule, key.draw, *where), 1)[0] % size
        return [free[(first + unit) % size] for unit in range(count)]
    if draw == "bernoulli":
        name = _coordinates(schedule, key.draw, *where)
        return [free[unit] for unit in bernoulli(name, size, [count / size] * size)]
    return _random(schedule, key, where, free, count)


def _counts_of(schedule: Schedule, size: int) -> int:
    """The smallest number of free layers that the schedule ever draws in a stratum."""
    pool = schedule.pools.layers
    fixed = pool.size - size
    return max(1, min(pool.kept(stage.layers) for stage in schedule.stages) - fixed)


def evenly_spaced(size: int, smallest: int) -> list[int]:
    """An order of `size` places whose first `smallest` are evenly spaced, and which then fills the widest
    gap, so that sets of growing size contain each other. Example: (6, 2) -> 0, 3, 1, 4, 2, 5."""
    order = [unit * size // smallest for unit in range(smallest)]
    while len(order) < size:
        taken = sorted(order) + [size]
        width, start = max(
            (after - before, -before) for before, after in zip(taken, taken[1:])
        )
        order.append(-start + width // 2)
    return order


def protected_layers(schedule: Schedule) -> tuple[int, ...]:
    """Layers that are never skipped, from 0."""
    options, last = schedule.options, schedule.shape.num_layers - 1
    first = (0,) if options.protect_first_layer else ()
    return tuple(dict.fromkeys(first + ((last,) if options.protect_last_layer else ())))


def _coordinates(
    schedule: Schedule, draw: int, layer: int | str, dimension: str, stratum: int | str
) -> str:
    return f"{HASH_VERSION}/{schedule.seed}/{draw}/{layer}/{dimension}/{stratum}"


def random_keys(name: str, count: int) -> tuple[int, ...]:
    """`count` 64-bit numbers that are a function of `name` alone."""
    return struct.unpack(f"<{count}Q", hashlib.shake_128(name.encode()).digest(8 * count))


def bernoulli(name: str, count: int, rates: list[float]) -> list[int]:
    """Places that are kept, each on its own with its rate; at least the one nearest to being kept."""
    values = [key / 2.0**64 for key in random_keys(name, count)]
    kept = [unit for unit in range(count) if values[unit] < rates[unit]]
    return kept or [min(range(count), key=lambda unit: values[unit] - rates[unit])]
