"""The stages of a schedule: which fraction of each dimension is kept from which step on."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.shape import DIMENSIONS, ModelShape, Pools, Rate, exact

FULL = Fraction(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The rates of the steps `start <= step < end`; None: to the end of training."""

    start: int
    end: int | None
    layers: Fraction
    heads: tuple[Fraction, ...]
    """One rate a layer."""
    mlp: tuple[Fraction, ...]

    @property
    def is_full(self) -> bool:
        return self.layers == 1 and all(rate == 1 for rate in self.heads + self.mlp)

    def describe(self) -> str:
        """Example: "layers 1/2 heads 1/2 mlp 1/2"."""
        parts = {"layers": {self.layers}, "heads": {*self.heads}, "mlp": {*self.mlp}}
        return " ".join(
            f"{name} {next(iter(rates)) if len(rates) == 1 else 'per layer'}"
            for name, rates in parts.items()
        )


def describe_rates(rates: tuple[Fraction, ...]) -> str:
    return " ".join(map(str, rates if len(set(rates)) > 1 else rates[:1]))


def end_converter(
    config: EstConfig, train_iters: int, tokens_after: Callable[[int], int]
) -> Callable[[Rate, str], int]:
    """How an end of the configuration becomes a step; `tokens_after(n)`: tokens of the first n steps."""

    def to_step(end: Rate, name: str) -> int:
        try:
            value = Fraction(str(end))
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"{name}={end!r} is not a number or a fraction such as 2/15") from None
        if value < 0:
            raise ValueError(f"{name}={end} must not be negative")
        if config.ends_in == "fraction":
            if value > 1:
                raise ValueError(f"{name}={end} is a fraction of the run: at most 1 (see est.ends_in)")
            return math.floor(value * train_iters + Fraction(1, 2))
        if config.ends_in == "steps":
            if value.denominator != 1:
                raise ValueError(f"{name}={end} must be a whole number of steps (see est.ends_in)")
            return int(value)
        return bisect_left(range(train_iters), value, key=tokens_after)

    return to_step


def wanted_stages(
    config: EstConfig, shape: ModelShape, to_step: Callable[[Rate, str], int]
) -> list[Stage]:
    """The stages as asked for, the full model last; ends are not decreasing."""
    entries = _listed(config, shape) if config.schedule == "stages" else _ordered(config, shape)
    stages, start = [], 0
    for name, until, rates in entries:
        end = to_step(until, name)
        if end < start:
            raise ValueError(f"{name}={until} is step {end}, before the stage starts at step {start}")
        stages.append(Stage(start=start, end=end, **rates))
        start = end
    full = (FULL,) * shape.num_layers
    return [*stages, Stage(start=start, end=None, layers=FULL, heads=full, mlp=full)]


def _listed(config: EstConfig, shape: ModelShape) -> list[tuple[str, Rate, dict]]:
    entries = []
    for number, stage in enumerate(config.stages):
        rates: dict[str, object] = {"layers": exact(stage.layers, f"est.stages[{number}].layers")}
        for name in ("heads", "mlp"):
            given, label = getattr(stage, name), f"est.stages[{number}].{name}"
            values = given if isinstance(given, list) else [given] * shape.num_layers
            if len(values) != shape.num_layers:
                raise ValueError(
                    f"{label} lists {len(values)} rates for {shape.num_layers} layers: give one a layer"
                )
            rates[name] = tuple(exact(value, label) for value in values)
        entries.append((f"est.stages[{number}].until", stage.until, rates))
    return entries


def _ordered(config: EstConfig, shape: ModelShape) -> list[tuple[str, Rate, dict]]:
    groups = [group.split("+") for group in config.order]
    known = [name for group in groups for name in group]
    drawn = {name: exact(getattr(config, name), f"est.{name}") for name in DIMENSIONS}
    missing = [name for name in DIMENSIONS if drawn[name] < 1 and name not in known]
    if len(config.ends) != len(groups) or len(set(known)) != len(known) or missing or (
        not set(known) <= set(DIMENSIONS)
    ):  # fmt: skip
        raise ValueError(
            f"est.order={config.order} with est.ends={config.ends}: want one end for each entry, and "
            f"{', '.join(DIMENSIONS)} once each (joined by + when they return together)"
        )
    entries = []
    for number, end in enumerate(config.ends):
        rates = {name: FULL if name in sum(groups[:number], []) else drawn[name] for name in DIMENSIONS}
        widths = {name: (rates[name],) * shape.num_layers for name in ("heads", "mlp")}
        entries.append((f"est.ends[{number}]", end, {"layers": rates["layers"], **widths}))
    return entries


def ramped(stages: list[Stage], pools: Pools, growth: Literal["linear", "cosine"]) -> list[Stage]:
    """Replace each stage by the steps of a ramp from its rates to the next stage's, in legal counts."""
    out = []
    for stage, after in zip(stages, stages[1:]):
        ramp = _Ramp(stage=stage, after=after, pools=pools, growth=growth)
        out += [ramp.at(step) for step in ramp.changes()]
    out.append(stages[-1])
    ends = [stage.start for stage in out[1:]]
    return [replace(stage, end=end) for stage, end in zip(out, ends)] + [out[-1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ramp:
    """The way from one stage's rates to the next one's."""

    stage: Stage
    after: Stage
    pools: Pools
    growth: Literal["linear", "cosine"]

    def _rate(self, step: int, low: Fraction, high: Fraction) -> Fraction:
        share = Fraction(step - self.stage.start, self.stage.end - self.stage.start)
        if self.growth == "cosine":
            share = Fraction((1.0 - math.cos(math.pi * float(share))) / 2.0)
        return low + (high - low) * share

    def changes(self) -> list[int]:
        """The steps, ascending, at which a legal count is first reached."""
        steps = range(self.stage.start, self.stage.end)
        starts = {self.stage.start} if steps else set()
        pairs = {("layers", self.stage.layers, self.after.layers)}
        for name in ("heads", "mlp"):
            both = zip(getattr(self.stage, name), getattr(self.after, name))
            pairs |= {(name, low, high) for low, high in both}
        for name, low, high in pairs:
            for rate in getattr(self.pools, name).legal_rates():
                if low < rate <= high:
                    step = self.stage.start + bisect_left(
                        steps, rate, key=lambda step: self._rate(step, low, high)
                    )
                    starts.add(step)
        return sorted(step for step in starts if step in steps)

    def at(self, step: int) -> Stage:
        def quantised(name: str, low: Fraction, high: Fraction) -> Fraction:
            return getattr(self.pools, name).quantise(self._rate(step, low, high))

        widths = {
            name: tuple(
                quantised(name, low, high)
                for low, high in zip(getattr(self.stage, name), getattr(self.after, name))
            )
            for name in ("heads", "mlp")
        }
        layers = quantised("layers", self.stage.layers, self.after.layers)
        return Stage(start=step, end=None, layers=layers, **widths)


def without_empty(stages: list[Stage]) -> tuple[Stage, ...]:
    """Without stages of no steps."""
    return tuple(stage for stage in stages if stage.end is None or stage.end > stage.start)


def check_per_layer_rates(stages: list[Stage], pools: Pools) -> None:
    """Rates that differ between layers must repeat in every pipeline stratum, and no layer be skipped."""
    for stage in stages:
        for name in ("heads", "mlp"):
            rates = getattr(stage, name)
            pattern = rates[: pools.layers.size]
            if len(set(rates)) > 1 and (
                rates != pattern * pools.layers.strata or stage.layers < 1
            ):
                raise ValueError(
                    f"per-layer rates of {name} ({describe_rates(rates)}) give pipeline stages unequal work: "
                    f"repeat one pattern of {pools.layers.size} layers in each of the "
                    f"{pools.layers.strata} strata (est.pp_strata) and keep all layers (layers: 1)"
                )
