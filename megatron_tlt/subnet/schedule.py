"""When the subnet grows: the schedule that a configuration becomes for one model and run.

EST (arXiv 2406.06962) trains random subnets and grows them in stages. Its practical schedule has three:
layers, heads and MLP neurons are drawn; then all layers run and heads and neurons are still drawn; then
the full model. The published stage ends are not known to us; the defaults fit the published saving.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.shape import (
    DIMENSIONS, ModelShape, Pools, automatic_strata, build_pools, exact,
)  # fmt: skip
from megatron_tlt.subnet.stages import (
    Stage, check_per_layer_rates, describe_rates, end_converter, ramped, wanted_stages, without_empty,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKeep:
    """Independent skipping of whole layers, for the baselines that do so.

    layer_drop (LayerDrop, arXiv 1909.11556): every layer is kept with `theta`. progressive_layer_drop
    (PLD, arXiv 2010.13369): theta(t) = (1 - theta) exp(-gamma t) + theta, and layer l of L is kept with
    1 - (l / L) (1 - theta(t)), l counted from 1; unlike PLD whole layers are skipped, not sublayers.
    """

    theta: float
    gamma: float | None = None

    def rate(self, step: int, layer: int, num_layers: int) -> float:
        """Probability that `layer` (from 0) runs in `step`."""
        if self.gamma is None:
            return self.theta
        now = (1.0 - self.theta) * math.exp(-self.gamma * step) + self.theta
        return 1.0 - (layer + 1) / num_layers * (1.0 - now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Everything that a step's plan depends on, besides the step."""

    shape: ModelShape
    pools: Pools
    stages: tuple[Stage, ...]
    options: EstConfig
    seed: int
    train_iters: int
    layer_keep: LayerKeep | None = None

    def stage_index(self, step: int) -> int:
        return bisect_right(self.stages, step, key=lambda stage: stage.start) - 1

    def with_growth_at(self, steps: list[int]) -> "Schedule":
        """The schedule whose stages ended early at `steps` (adaptive); later ends stay, as latest steps."""
        starts = [0, *steps]
        starts += [max(stage.start, starts[-1]) for stage in self.stages[len(starts) :]]
        ends = [*starts[1:], None]
        stages = tuple(
            replace(stage, start=start, end=end)
            for stage, start, end in zip(self.stages, starts, ends, strict=True)
        )
        return replace(self, stages=stages)

    @property
    def is_balanced(self) -> bool:
        """Whether every TP rank and pipeline stage gets the same work in every step."""
        draws = {self.options.draw, self.options.layer_draw}
        return self.layer_keep is None and "bernoulli" not in draws

    def check_layout(self, *, tensor: int, pipeline: int, virtual: int = 1) -> None:
        """Raise ValueError, with the remedy, when ranks of this layout would get unequal work."""
        self.pools.check_layout(tensor=tensor, pipeline=pipeline, virtual=virtual)
        if not self.is_balanced and tensor * pipeline > 1:
            raise ValueError(
                f"est.schedule={self.options.schedule} with est.draw={self.options.draw} draws units "
                f"independently, so tensor_model_parallel_size={tensor} x pipeline_model_parallel_size="
                f"{pipeline} ranks would get unequal work: use data parallelism only, or an exact draw"
            )

    def identity(self) -> dict[str, object]:
        """What must agree for a resumed run to draw the same subnets, in plain values."""
        names = (
            "schedule", "draw", "layer_draw", "resample_interval", "shared_draws", "antithetic",
            "protect_first_layer", "protect_last_layer", "output_scale", "layer_scale", "idle_params",
        )  # fmt: skip
        return {name: getattr(self.options, name) for name in names} | {
            "seed": self.seed,
            "tp_strata": self.pools.tp_strata,
            "pp_strata": self.pools.pp_strata,
            "mlp_block_size": self.pools.mlp_block_size,
            "gqa_unit": self.pools.gqa_unit,
            "stages": [
                [stage.start, str(stage.layers), *map(describe_rates, (stage.heads, stage.mlp))]
                for stage in self.stages
            ],
            "layer_keep": None if self.layer_keep is None else str(self.layer_keep),
        }


def build_schedule(
    config: EstConfig,
    shape: ModelShape,
    *,
    train_iters: int,
    seed: int,
    tokens_after: Callable[[int], int],
) -> Schedule:
    """Resolve a configuration for one model and run; `tokens_after(n)` is the tokens of the first n steps.

    Raises ValueError, with the numbers and the nearest legal values, for what cannot be trained.
    """
    config, layer_keep = _as_stages(config)
    to_step = end_converter(config, train_iters, tokens_after)
    wanted = wanted_stages(config, shape, to_step)
    rates = {
        "layers": {stage.layers for stage in wanted},
        "heads": {rate for stage in wanted for rate in stage.heads},
        "mlp": {rate for stage in wanted for rate in stage.mlp},
    }
    grid = dict(
        gqa_unit=config.gqa_unit, mlp_block_size=config.mlp_block_size, mlp_align=config.mlp_align
    )
    tp_strata, pp_strata = automatic_strata(
        shape, rates, tp_strata=config.tp_strata, pp_strata=config.pp_strata, **grid
    )
    pools = build_pools(shape, tp_strata=tp_strata, pp_strata=pp_strata, **grid)
    for name in DIMENSIONS:
        for rate in sorted(rates[name]):
            getattr(pools, name).kept(rate)
    stages = wanted if config.growth == "step" else ramped(wanted, pools, config.growth)
    check_per_layer_rates(stages, pools)
    _check_draws(config, stages, pools)
    return Schedule(
        shape=shape,
        pools=pools,
        stages=without_empty(stages),
        options=config,
        seed=seed if config.seed is None else config.seed,
        train_iters=train_iters,
        layer_keep=layer_keep,
    )


def _as_stages(config: EstConfig) -> tuple[EstConfig, LayerKeep | None]:
    """The same stages and draws for every schedule; only two baselines skip layers independently."""
    if config.schedule == "dense":
        return replace(config, layers=1, heads=1, mlp=1, order=[], ends=[]), None
    if config.schedule == "layer_drop":
        theta = 1.0 - float(exact(config.layer_drop_rate, "est.layer_drop_rate"))
        if theta <= 0.0:
            raise ValueError(f"est.layer_drop_rate={config.layer_drop_rate} must be below 1")
        return replace(config, layers=1, heads=1, mlp=1, order=[], ends=[]), LayerKeep(theta=theta)
    if config.schedule == "progressive_layer_drop":
        keep = LayerKeep(theta=config.pld_theta, gamma=config.pld_gamma)
        return replace(config, layers=1, heads=1, mlp=1, order=[], ends=[]), keep
    if config.schedule == "depth_staged":
        return replace(
            config, heads=1, mlp=1, order=["layers"], ends=config.ends[:1],
            protect_first_layer=True, protect_last_layer=True,
        ), None  # fmt: skip
    if config.schedule == "fixed_then_full":
        return replace(
            config, order=["layers+heads+mlp"], ends=config.ends[-1:], resample_interval="never"
        ), None
    return config, None


def _check_draws(config: EstConfig, stages: list[Stage], pools: Pools) -> None:
    """Counts and draws that do not go together."""
    protected = config.protect_first_layer + config.protect_last_layer
    if pools.layers.strata > 1:
        protected = min(protected, 1)
    for stage in stages:
        kept = pools.layers.kept(stage.layers)
        if kept < protected:
            raise ValueError(
                f"rate {stage.layers} of layers keeps {kept} of {pools.layers.size} in a stratum, fewer "
                f"than the {protected} protected layers in it: raise the rate or protect fewer"
            )
    drawn = any(rate < 1 for stage in stages for rate in stage.heads)
    if config.draw == "bernoulli" and pools.gqa_unit == "heads" and drawn:
        raise ValueError(
            "est.draw=bernoulli keeps different numbers of heads in the groups, which grouped-query "
            "attention cannot run: set est.gqa_unit=groups or est.heads=1"
        )
