"""Configuration of subnet training, as it stands in the YAML file and on the command line."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_tlt.subnet.shape import GqaUnit, Rate

ScheduleName = Literal[
    "dense", "practical", "stages", "adaptive", "progressive_layer_drop", "layer_drop",
    "depth_staged", "fixed_then_full",
]  # fmt: skip
Draw = Literal["random", "nested", "window", "rotating", "bernoulli"]


@dataclass(kw_only=True, slots=True)
class StageConfig:
    """One stage of `schedule: stages`: the rates kept until an end."""

    until: Rate
    """End of the stage, in the unit of est.ends_in; the model is full after the last stage."""
    layers: Rate = 1.0
    """Fraction of the layers that run."""
    heads: Rate | list[Rate] = 1.0
    """Fraction of the heads that run, or one fraction a layer."""
    mlp: Rate | list[Rate] = 1.0
    """Fraction of the MLP neurons that run, or one fraction a layer."""


@dataclass(kw_only=True, slots=True)
class EstConfig:
    """Evolving subnetwork training (EST) and what it is compared with."""

    schedule: ScheduleName = "dense"
    """dense: no subnets. practical: EST's three stages. stages: the list below. adaptive: the practical
    stages, each ended by the loss. The rest are baselines: progressive_layer_drop, layer_drop,
    depth_staged (layers only, first and last kept), fixed_then_full (one subnet, then the full model)."""
    layers: Rate = "1/2"
    """Fraction of the layers kept while layers are drawn; exact, e.g. 1/2 or 5/11."""
    heads: Rate = "1/2"
    """Fraction of the attention heads kept while heads are drawn."""
    mlp: Rate = "1/2"
    """Fraction of the MLP neurons kept while neurons are drawn."""
    order: list[str] = field(default_factory=lambda: ["layers", "heads+mlp"])
    """What returns to full size at each end: layers, heads and mlp, joined by + when together."""
    ends: list[Rate] = field(default_factory=lambda: ["2/15", "7/15"])
    """Where each group of `order` has returned to full size; adaptive: the latest step of it."""
    ends_in: Literal["fraction", "steps", "tokens"] = "fraction"
    """Unit of the ends: fraction of training.train_iters, optimizer steps, or tokens."""
    growth: Literal["step", "linear", "cosine"] = "step"
    """How a group returns: at its end at once, or along a ramp from the end before, in legal counts."""
    stages: list[StageConfig] | None = None
    """The stages of `schedule: stages`, in order."""
    draw: Draw = "random"
    """Which heads and neurons: random; nested (the first ones); window (contiguous, random place);
    rotating (contiguous, moving on at every draw); bernoulli (each on its own, for comparison)."""
    layer_draw: Draw | None = None
    """Which layers; default as `draw`, where nested and rotating mean evenly spaced."""
    resample_interval: int | Literal["stage", "never"] = 1
    """Steps for which one subnet is kept, or for the whole stage, or for ever."""
    shared_draws: bool = False
    """Draw the same heads and neurons in all layers instead of independently per layer."""
    antithetic: bool = False
    """Draw in pairs: every second draw takes the other end of the same random order, so that at rate 1/2
    each weight is trained once in two draws."""
    protect_first_layer: bool = False
    """Never skip the first layer."""
    protect_last_layer: bool = False
    """Never skip the last layer."""
    output_scale: Literal["inverse_rate", "none"] = "inverse_rate"
    """Multiply the outputs of attention and MLP by 1 / (fraction of heads or neurons kept), so that their
    mean over random draws is the full output; or leave them, so that a subnet that persists goes on as it
    was when others join it."""
    layer_scale: Literal["none", "inverse_rate"] = "none"
    """Multiply the residual branches of drawn layers by 1 / (fraction kept), or leave them."""
    gqa_unit: GqaUnit = "heads"
    """With grouped-query attention: draw query heads inside every group, or whole groups."""
    mlp_block_size: int = 16
    """Neurons that are drawn together: a contiguous, aligned piece of the weights."""
    mlp_align: int = 16
    """The neurons kept in each TP stratum are a multiple of this (FP8: 16, blockwise 128)."""
    tp_strata: int | None = None
    """Largest TP size that the draws are balanced for; default: the largest legal power of two up to 8."""
    pp_strata: int | None = None
    """Largest pipeline stages x virtual stages that the draws are balanced for; default likewise."""
    idle_params: Literal["zero_grad", "frozen"] = "zero_grad"
    """What the optimizer does with weights outside the subnet: a step with gradient zero (momentum and
    weight decay go on, Megatron's natural behaviour), or nothing."""
    layer_drop_rate: Rate = "1/5"
    """layer_drop: probability with which a layer is skipped, through the whole run."""
    pld_theta: float = 0.5
    """progressive_layer_drop: keep probability that the last layer ends at."""
    pld_gamma: float = 0.001
    """progressive_layer_drop: speed with which it gets there, per step."""
    adaptive_window: int = 100
    """adaptive: steps over which the loss is averaged, and the shortest stage is two windows."""
    adaptive_min_gain: float = 0.01
    """adaptive: grow when a window lowers the mean loss by less than this many nats."""
    adaptive_drop_ratio: float = 0.25
    """adaptive: grow too when a window gains less than this share of what the last growth gained at once."""
    micro_batch_per_stage: list[int] | None = None
    """Samples per forward pass in the first stages, multiples of training.micro_batch_size; later stages
    use that. A subnet leaves activation memory for more; batch and gradient stay the same."""
    digest_interval: int = 100
    """Steps between checks that all ranks train the same subnet; 0: only at the first step."""
    seed: int | None = None
    """Seed of the draws; default training.seed."""

    @property
    def is_dense(self) -> bool:
        return self.schedule == "dense"

    def __post_init__(self) -> None:
        interval = self.resample_interval
        if isinstance(interval, int) and interval < 1:
            raise ValueError(f"est.resample_interval={interval} must be at least 1 step")
        if self.adaptive_window < 1 or self.digest_interval < 0:
            raise ValueError(
                f"est.adaptive_window={self.adaptive_window} must be at least 1 and "
                f"est.digest_interval={self.digest_interval} at least 0"
            )
        if not 0.0 < self.pld_theta <= 1.0 or self.pld_gamma <= 0.0:
            raise ValueError(
                f"est.pld_theta={self.pld_theta} must be in (0, 1] and pld_gamma={self.pld_gamma} above 0"
            )
        if (self.schedule == "stages") != bool(self.stages):
            raise ValueError(
                f"est.schedule={self.schedule} and est.stages ({len(self.stages or [])} given) do not fit: "
                "schedule stages needs a list of stages, and only it has one"
            )
