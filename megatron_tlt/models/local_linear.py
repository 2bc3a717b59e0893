"""The linear layers of the `local` back-end: megatron-core's, with other products (ops/linear.py).

s sequence, b batch, h hidden, t TP size. A subclass that computes otherwise (in FP8) overrides `compute`; one
that computes with part of the weights (a subnet) overrides `forward` and `_forward_impl`.
"""

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)
from megatron_tlt.ops.linear import linear

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class LocalColumnParallelLinear(ColumnParallelLinear):
    """`[s, b, h] -> [s, b, out/t]`; the bias inside the GEMM, the weight gradient into `main_grad`.

    Unlike megatron's, it never hands the bias back to be added later (`skip_bias_add`): that costs a
    pass over the activations, and a bias that leaves a recomputed MLP sends its backward into endless
    recursion.
    """

    compute = staticmethod(linear)
    """The products of the layer, forward and backward, with their collectives."""

    def __init__(self, *args: object, skip_bias_add: bool = False, **options: object) -> None:
        super().__init__(*args, skip_bias_add=False, **options)

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        if self.tp_group.size() > 1:
            return super().forward(input_, weight, runtime_gather_output)
        return self.compute(input_, self.weight if weight is None else weight, self.bias), None

    def _forward_impl(self, input, weight, *, bias=None, allreduce_dgrad=False, **options):
        """megatron-core's GEMM with its collectives, by ours."""
        return self.compute(
            input,
            weight,
            bias,
            group=self.tp_group,
            allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=options["sequence_parallel"],
        )


class LocalRowParallelLinear(RowParallelLinear):
    """`[s, b, in/t] -> [s, b, h]`; on one TP rank the bias is added inside the GEMM.

    It adds its bias itself, for the reasons given above.
    """

    compute = staticmethod(linear)

    def __init__(self, *args: object, skip_bias_add: bool = False, **options: object) -> None:
        super().__init__(*args, skip_bias_add=False, **options)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.tp_group.size() > 1:
            return super().forward(input_)
        return self.compute(input_, self.weight, self.bias), None

    def _forward_impl(self, input, weight, *, bias=None, **_: object):
        """megatron-core's GEMM, by ours; the caller reduces the output."""
        return self.compute(input, weight, bias, group=self.tp_group)
