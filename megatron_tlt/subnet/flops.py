"""FLOPs of subnets: per plan, per rank, per run, and what a schedule saves.

2 FLOPs per multiply-add, backward twice forward, causal half of the attention scores, padded vocabulary,
no recomputation. The published savings of EST (26.7 % GPT-2, 25.0 % TinyLlama) come out exactly under
"layers only", without the output head; `total` counts it, and is what a run really saves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from megatron_tlt.subnet.draw import LayerPlan, Plan
from megatron_tlt.subnet.schedule import Schedule
from megatron_tlt.subnet.shape import ModelShape, Pools
from megatron_tlt.subnet.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs of forward and backward, by part; per token unless said."""

    attention_linears: float = 0.0
    core_attention: float = 0.0
    mlp: float = 0.0
    output_head: float = 0.0

    @property
    def layers(self) -> float:
        """Without the output head: what the paper's figures count."""
        return self.attention_linears + self.core_attention + self.mlp

    @property
    def total(self) -> float:
        return self.layers + self.output_head

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            attention_linears=self.attention_linears + other.attention_linears,
            core_attention=self.core_attention + other.core_attention,
            mlp=self.mlp + other.mlp,
            output_head=self.output_head + other.output_head,
        )

    def __mul__(self, factor: float) -> "Flops":
        return Flops(
            attention_linears=self.attention_linears * factor,
            core_attention=self.core_attention * factor,
            mlp=self.mlp * factor,
            output_head=self.output_head * factor,
        )


def layer_flops(shape: ModelShape, *, heads: float, groups: float, neurons: float) -> Flops:
    """One layer with that many query heads, key/value groups and MLP neurons."""
    h, d = shape.hidden_size, shape.kv_channels
    return Flops(
        attention_linears=6 * h * d * (2 * heads + 2 * groups),
        core_attention=6 * heads * d * (shape.seq_length + 1),
        mlp=6 * h * neurons * (3 if shape.swiglu else 2),
    )


def head_flops(shape: ModelShape) -> Flops:
    return Flops(output_head=6 * shape.hidden_size * shape.padded_vocab_size)


def dense_flops(shape: ModelShape) -> Flops:
    """The full model."""
    layer = layer_flops(
        shape,
        heads=shape.num_attention_heads,
        groups=shape.num_query_groups,
        neurons=shape.ffn_hidden_size,
    )
    return layer * shape.num_layers + head_flops(shape)


def plan_flops(schedule: Schedule, plan: Plan) -> Flops:
    """The subnet of one step."""
    total = head_flops(schedule.shape)
    for layer in plan.layers:
        if layer is not None:
            total = total + _layer_plan_flops(schedule, layer, part=(0, 1))
    return total


def stage_flops(schedule: Schedule, stage: Stage) -> Flops:
    """The subnets of a stage, by their rates: every plan of an exact-count draw has just these."""
    shape, pools = schedule.shape, schedule.pools
    total = head_flops(shape)
    for heads, mlp in zip(stage.heads, stage.mlp, strict=True):
        layer = layer_flops(
            shape,
            heads=float(heads) * shape.num_attention_heads,
            groups=(1.0 if pools.gqa_unit == "heads" else float(heads)) * shape.num_query_groups,
            neurons=float(mlp) * shape.ffn_hidden_size,
        )
        total = total + layer * float(stage.layers)
    return total


def rank_flops(schedule: Schedule, plan: Plan, *, tensor: int, chunks: int) -> list[list[Flops]]:
    """`[chunk][tp_rank]`: layers' FLOPs of each pipeline chunk (stages x virtual stages) and TP rank."""
    size = schedule.shape.num_layers // chunks
    out = []
    for chunk in range(chunks):
        layers = [x for x in plan.layers[chunk * size : (chunk + 1) * size] if x is not None]
        out.append(
            [
                sum(
                    (_layer_plan_flops(schedule, x, part=(rank, tensor)) for x in layers), start=Flops()
                )
                for rank in range(tensor)
            ]
        )
    return out


def _layer_plan_flops(schedule: Schedule, layer: LayerPlan, *, part: tuple[int, int]) -> Flops:
    """FLOPs of TP rank `part[0]` of `part[1]` in one layer."""
    shape, pools = schedule.shape, schedule.pools
    units = _count(layer.heads, pools.heads.total, part)
    groups = shape.num_query_groups / part[1] if pools.gqa_unit == "heads" else units
    heads = units if pools.gqa_unit == "heads" else units * shape.heads_per_group
    blocks = _count(layer.mlp, pools.mlp.total, part)
    return layer_flops(shape, heads=heads, groups=groups, neurons=blocks * pools.mlp_block_size)


def _count(units: tuple[int, ...] | None, total: int, part: tuple[int, int]) -> float:
    rank, ranks = part
    if units is None:
        return total / ranks
    return sum(rank * total <= unit * ranks < (rank + 1) * total for unit in units)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Fraction of a dense run's FLOPs that a schedule saves. Example: layers 0.2667, total 0.189."""

    layers: float
    total: float


def predicted_saving(schedule: Schedule, *, tokens_after: Callable[[int], int]) -> Saving:
    """The saving of the whole run at equal steps, from the rates; `tokens_after(n)`: of the first n steps."""
    steps = schedule.train_iters
    dense = dense_flops(schedule.shape)
    if schedule.layer_keep is not None:
        return _expected_saving(schedule, dense)
    layers = total = 0.0
    for stage in schedule.stages:
        end = steps if stage.end is None else min(stage.end, steps)
        tokens = tokens_after(end) - tokens_after(min(stage.start, steps))
        work = stage_flops(schedule, stage)
        layers += tokens * work.layers
        total += tokens * work.total
    whole = tokens_after(steps)
    return Saving(layers=1.0 - layers / (whole * dense.layers), total=1.0 - total / (whole * dense.total))


def _expected_saving(schedule: Schedule, dense: Flops) -> Saving:
    """For layers that are skipped independently: their mean keep probability over up to 1,000 steps."""
    count = schedule.shape.num_layers
    steps = range(0, schedule.train_iters, -(-schedule.train_iters // 1000))
    rates = [schedule.layer_keep.rate(step, layer, count) for step in steps for layer in range(count)]
    skipped = 1.0 - sum(rates) / len(rates)
    return Saving(layers=skipped, total=skipped * dense.layers / dense.total)


@dataclass(kw_only=True, slots=True)
class FlopsMeter:
    """FLOPs of the run so far: of the work done, and of dense steps over the same tokens."""

    schedule: Schedule
    layers: float = 0.0
    total: float = 0.0
    dense_layers: float = 0.0
    dense_total: float = 0.0

    def add(self, plan: Plan, *, tokens: int) -> Flops:
        """Count a step; returns the step's FLOPs (all ranks, all tokens)."""
        work, dense = plan_flops(self.schedule, plan) * tokens, dense_flops(self.schedule.shape)
        self.layers += work.layers
        self.total += work.total
        self.dense_layers += dense.layers * tokens
        self.dense_total += dense.total * tokens
        return work

    def saving(self) -> Saving:
        if self.dense_total == 0.0:
            return Saving(layers=0.0, total=0.0)
        return Saving(
            layers=1.0 - self.layers / self.dense_layers, total=1.0 - self.total / self.dense_total
        )

    def state_dict(self) -> dict[str, float]:
        names = ("layers", "total", "dense_layers", "dense_total")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name, value in state.items():
            setattr(self, name, float(value))


def describe_stages(schedule: Schedule, *, tensor: int, tokens_after: Callable[[int], int]) -> list[str]:
    """Lines for a dry run: steps, rates, shapes per TP rank, FLOPs of each stage, and the run's savings."""
    dense, shape = dense_flops(schedule.shape), schedule.shape
    lines = [_describe_grid(schedule.pools)]
    shown = schedule.stages if len(schedule.stages) <= 8 else schedule.stages[:7] + schedule.stages[-1:]
    for stage in shown:
        work = stage_flops(schedule, stage)
        end = schedule.train_iters if stage.end is None else stage.end
        lines.append(
            f" steps {stage.start} to {end}: {stage.describe()}; "
            f"{_per_rank(shape, schedule.pools, stage, tensor)}; FLOPs "
            f"{work.layers / dense.layers:.4f} of the layers, {work.total / dense.total:.4f} of all"
        )
    if len(shown) < len(schedule.stages):
        lines.append(f" ({len(schedule.stages)} stages, the ramp's middle left out)")
    saving = predicted_saving(schedule, tokens_after=tokens_after)
    lines.append(
        f" FLOPs saved over the run: {saving.layers:.2%} layers only (the paper's count), "
        f"{saving.total:.2%} in all; ideal speed-up {1.0 / (1.0 - saving.total):.3f}x"
    )
    return lines


def _describe_grid(pools: Pools) -> str:
    return (
        f" subnets: balanced for tensor parallelism up to {pools.tp_strata} and pipeline stages up to "
        f"{pools.pp_strata}; MLP neurons in blocks of {pools.mlp_block_size}"
    )


def _per_rank(shape: ModelShape, pools: Pools, stage: Stage, tensor: int) -> str:
    """Example: "6 of 12 layers, 3 heads and 768 neurons per rank" (of the first layer)."""
    heads = Fraction(shape.num_attention_heads, tensor) * stage.heads[0]
    neurons = Fraction(shape.ffn_hidden_size, tensor) * stage.mlp[0]
    layers = pools.layers.kept(stage.layers) * pools.layers.strata
    return f"{layers} of {shape.num_layers} layers, {heads} heads and {neurons} neurons per rank"
