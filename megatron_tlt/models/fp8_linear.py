"""The FP8 linear layers of the `local` back-end: they stand where Transformer Engine's stand on GPUs.

Weights stay in bf16 or fp32 and are quantised for each product, so nothing has to be thrown away when a
weight or its slice changes. Delayed scaling keeps its state in two buffers of a layer (`fp8.scale`,
`fp8.amax_history`), which the checkpoint holds like weights. Unlike Transformer Engine, which moves to new
scales after every micro-batch, all micro-batches of an optimizer step use the same ones: so a step does not
depend on how the batch is cut, recomputed activations are those of the first pass, and one all-reduce a step
suffices.
"""

from collections.abc import Iterable

from megatron_tlt.models.local_linear import LocalColumnParallelLinear, LocalRowParallelLinear
from megatron_tlt.ops.fp8 import amax_of, update_delayed_scaling
from megatron_tlt.ops.fp8_linear import fp8_linear
from megatron_tlt.ops.fp8_recipe import NUM_TENSORS, Both, Recipe

import torch
import torch.distributed as dist


DELAYED_STATE = (".fp8.scale", ".fp8.amax_history")
"""How the names of delayed scaling's state end in a checkpoint."""


class Fp8Quantizer(torch.nn.Module):
    """Quantises the tensors of one layer; for delayed scaling it keeps their scales and amax."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        if recipe.is_delayed:
            history = torch.zeros(recipe.amax_history_len, NUM_TENSORS)
            self.register_buffer("scale", torch.ones(NUM_TENSORS))
            self.register_buffer("amax_history", history)

    def forward(
        self, x: torch.Tensor, tensor: int, *, columnwise: bool, record: bool
    ) -> Both:
        """`x` `[m, k]`; `record` its amax for the next scale."""
        if not self.recipe.is_delayed:
            return self.recipe.quantize(x, tensor, columnwise=columnwise)
        if record:
            largest = self.amax_history[0, tensor]
            torch.maximum(largest, amax_of(x), out=largest)
        scale = self.scale[tensor]
        return self.recipe.quantize(x, tensor, columnwise=columnwise, scale=scale)

    def _load_from_state_dict(self, state_dict, prefix: str, *args: object) -> None:
        """What the checkpoint does not have stays as it is."""
        own = {prefix + name: buffer for name, buffer in self._buffers.items()}
        super()._load_from_state_dict(own | state_dict, prefix, *args)

    def _apply(self, fn, recurse: bool = True) -> "Fp8Quantizer":
        """To another device, but never to another dtype: scales stay float32 in a bf16 model."""
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self


class Fp8Products:
    """Put before a linear of the `local` back-end in its bases: its products run in FP8."""

    def __init__(self, *args: object, fp8: Recipe, **options: object) -> None:
        super().__init__(*args, **options)
        self.fp8 = Fp8Quantizer(fp8)

    def compute(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        **collectives: object,
    ) -> torch.Tensor:
        """The layer's products, as `ops.linear.linear`."""
        return fp8_linear(input, weight, bias, quantizer=self.fp8, **collectives)


class Fp8ColumnParallelLinear(Fp8Products, LocalColumnParallelLinear):
    """`[s, b, h] -> [s, b, out/t]` in FP8."""


class Fp8RowParallelLinear(Fp8Products, LocalRowParallelLinear):
    """`[s, b, in/t] -> [s, b, h]` in FP8."""


class DelayedScaling:
    """Takes the layers of a model's chunks from one optimizer step's scales to the next one's.

    The amax of a tensor is the largest over `group`: the ranks that hold parts (TP) or copies (DP) of this
    pipeline stage, as in Transformer Engine. Layers are visited in the model's order, whichever of them ran,
    so ranks cannot mix them up; a layer that did not run keeps its scales.
    """

    def __init__(
        self, chunks: Iterable[torch.nn.Module], group: dist.ProcessGroup
    ) -> None:
        modules = [module for chunk in chunks for module in chunk.modules()]
        self._layers = [
            m for m in modules if isinstance(m, Fp8Quantizer) and m.recipe.is_delayed
        ]
        self._group = group

    def update(self) -> None:
        """After the last backward pass of a step; a collective over the group."""
        if not self._layers:
            return
        recipe = self._layers[0].recipe
        scale = torch.cat([layer.scale for layer in self._layers])  # [n]
        history = torch.cat([layer.amax_history for layer in self._layers], dim=1)  # [h, n]
        if self._group.size() > 1:
            dist.all_reduce(history[0], op=dist.ReduceOp.MAX, group=self._group)
        update_delayed_scaling(
            history,
            scale,
            recipe.largest().to(scale.device).repeat(len(self._layers)),
            margin=recipe.margin,
            amax_compute_algo=recipe.amax_compute_algo,
        )
        parts = zip(self._layers, scale.split(NUM_TENSORS), history.split(NUM_TENSORS, dim=1))
        for layer, scales, window in parts:
            layer.scale.copy_(scales)
            layer.amax_history.copy_(window)
