"""The precision of the linear layers: what a user asks for, and whether this model and layout allow it."""

from dataclasses import dataclass
from typing import Literal, Protocol

from megatron_tlt.models import te
from megatron_tlt.ops.fp8_recipe import Format, Recipe, RecipeName


class HasLayerShape(Protocol):
    """Any configuration with Megatron's names for the sizes of a decoder layer."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int


@dataclass(kw_only=True, slots=True, frozen=True)
class PrecisionConfig:
    """FP8 of the decoder's linear layers (Megatron's spelling). Embedding, attention scores, norms, output
    head and all weights stay in bf16 or fp32."""

    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Whose layers run: ours, which compute FP8 in plain torch on any device, or Transformer Engine's;
    default: Transformer Engine's on CUDA where it is installed, else ours."""
    fp8: Format | None = None
    """e4m3 for all tensors, or hybrid: e4m3 forward and e5m2 for gradients; none: no FP8."""
    fp8_recipe: RecipeName = "delayed"
    """delayed: one scale a tensor, from earlier steps. tensorwise: one, from the tensor itself. blockwise:
    one for 1 x 128 or 128 x 128 tiles. mxfp8: one power of two for 32 elements."""
    fp8_margin: int = 0
    """delayed: leave 2^margin of headroom above the largest value seen."""
    fp8_amax_history_len: int = 1
    """delayed: steps of which the largest values are kept."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """delayed: scale by the newest of them or by the largest."""
    first_last_layers_bf16: bool = False
    """Keep the layers at both ends out of FP8; not with delayed scaling."""
    num_layers_at_start_in_bf16: int = 1
    """With first_last_layers_bf16: layers at the start."""
    num_layers_at_end_in_bf16: int = 1
    """With first_last_layers_bf16: layers at the end."""
    fp8_param_gather: bool = False
    """Keep and gather the weights themselves in FP8: Transformer Engine only, and not with subnets."""

    def __post_init__(self) -> None:
        if self.fp8_amax_history_len < 1:
            raise ValueError(
                f"precision.fp8_amax_history_len={self.fp8_amax_history_len} must be at least 1 step"
            )
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if getattr(self, name) < 0:
                raise ValueError(f"precision.{name}={getattr(self, name)} must not be negative")
        if self.fp8 is None and (self.first_last_layers_bf16 or self.fp8_param_gather):
            raise ValueError(
                "precision.first_last_layers_bf16 and precision.fp8_param_gather need precision.fp8 "
                "(hybrid or e4m3)"
            )
        self._check_recipe()

    def _check_recipe(self) -> None:
        is_delayed = self.fp8_recipe == "delayed"
        if is_delayed and self.first_last_layers_bf16:
            raise ValueError(
                "precision.first_last_layers_bf16 does not go with precision.fp8_recipe=delayed, whose "
                "scales are reduced over all layers together: use tensorwise, blockwise or mxfp8"
            )
        given = (self.fp8_margin, self.fp8_amax_history_len, self.fp8_amax_compute_algo)
        if not is_delayed and given != (0, 1, "most_recent"):
            raise ValueError(
                f"precision.fp8_margin={given[0]}, fp8_amax_history_len={given[1]} and "
                f"fp8_amax_compute_algo={given[2]} belong to delayed scaling: with precision.fp8_recipe="
                f"{self.fp8_recipe} leave them out"
            )

    @property
    def recipe(self) -> Recipe | None:
        """None without FP8."""
        if self.fp8 is None:
            return None
        return Recipe(
            name=self.fp8_recipe,
            format=self.fp8,
            margin=self.fp8_margin,
            amax_history_len=self.fp8_amax_history_len,
            amax_compute_algo=self.fp8_amax_compute_algo,
        )

    @property
    def uses_transformer_engine(self) -> bool:
        """Whose layers run, the default resolved by what this machine has."""
        if self.transformer_impl is None:
            return te.is_available()
        return self.transformer_impl == "transformer_engine"

    def megatron_fields(self) -> dict[str, object]:
        """FP8 as megatron-core's configuration has it, by which it runs Transformer Engine's layers; empty
        for ours, whose spec carries the recipe."""
        if self.fp8 is None or not self.uses_transformer_engine:
            return {}
        same = (
            "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo",
            "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
        )  # fmt: skip
        return {name: getattr(self, name) for name in same} | {"fp8_param": self.fp8_param_gather}

    def layer_recipe(self, layer: int, num_layers: int) -> Recipe | None:
        """The recipe of `layer`, counted from 0 over the whole model; None: it runs without FP8."""
        start, end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        if self.first_last_layers_bf16 and not start <= layer < num_layers - end:
            return None
        return self.recipe

    def check_subnets(self) -> None:
        """Raise ValueError for what does not go with subnets."""
        if self.fp8_param_gather:
            raise ValueError(
                "precision.fp8_param_gather=true does not go with est.schedule: a slice of weights that are "
                "stored in FP8 has no transpose and no block scales of its own; leave it out, so that "
                "weights stay in bf16 and slices are quantised at use"
            )

    def check_shapes(
        self, model: HasLayerShape, *, tensor_model_parallel_size: int, micro_batch_size: int
    ) -> None:
        """Raise ValueError, with the numbers, when a product's size does not fit the recipe.

        All providers are held to the same rule, so what runs on a CPU runs on a GPU.
        """
        if self.transformer_impl == "transformer_engine":
            te.check_installed()
        if self.recipe is None:
            return
        if self.fp8_param_gather and not self.uses_transformer_engine:
            raise ValueError(
                "precision.fp8_param_gather=true needs precision.transformer_impl=transformer_engine: our "
                "layers keep their weights in bf16 or fp32"
            )
        ends = self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16
        if self.first_last_layers_bf16 and ends >= model.num_layers:
            raise ValueError(
                f"precision.num_layers_at_start_in_bf16 + num_layers_at_end_in_bf16 = {ends} leave none of "
                f"model.num_layers={model.num_layers} in FP8: lower them or leave precision.fp8 out"
            )
        ranks, d = tensor_model_parallel_size, model.kv_channels
        heads, groups = model.num_attention_heads // ranks, model.num_query_groups // ranks
        sizes = {
            "model.hidden_size": model.hidden_size,
            "query, key and value rows of a TP rank": (heads + 2 * groups) * d,
            "attention output of a TP rank": heads * d,
            "MLP neurons of a TP rank": model.ffn_hidden_size // ranks,
            "tokens of a micro-batch (model.seq_length x training.micro_batch_size)": (
                model.seq_length * micro_batch_size
            ),
        }
        check_alignment(sizes, self.recipe)


def check_alignment(sizes: dict[str, int], recipe: Recipe) -> None:
    """Raise ValueError naming every size that is no multiple of the recipe's alignment."""
    wrong = {name: size for name, size in sizes.items() if size % recipe.alignment}
    if wrong:
        raise ValueError(
            f"precision.fp8_recipe={recipe.name} multiplies in pieces of {recipe.alignment}, which do not "
            "divide " + ", ".join(f"{name} = {size}" for name, size in wrong.items())
            + ": change the shape or take another recipe (alignment: delayed and tensorwise 16, mxfp8 32, "
            "blockwise 128)"
        )
