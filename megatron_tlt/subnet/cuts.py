"""Cutting a subnet's weights out of the full ones, and putting their gradients back.

A cut is gathered once per optimizer step and used by all micro-batches. Autograd sees the full parameter:
the backward of a cut adds the slice's gradient into the parameter's `main_grad` (megatron-core's gradient
buffer), where everything outside the slice stays zero, and lets the data-parallel hook of the parameter
fire as ever, with a gradient that holds nothing. Without such a buffer it gives an ordinary gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """Equal blocks along one dimension of a local weight. Example: dim 0, block 16, index (0, 3) of a
    `[64, h]` weight is rows 0 to 15 and 48 to 63."""

    dim: int
    block: int
    index: tuple[int, ...]
    """Kept blocks, ascending."""
    _tensor: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False)

    @property
    def is_one_run(self) -> bool:
        return self.index[-1] - self.index[0] + 1 == len(self.index)

    def take(self, weight: torch.Tensor) -> torch.Tensor:
        """The slice: a view where it is one run of rows, else a contiguous copy."""
        if self.is_one_run:
            part = self._narrow(weight)
            return part if self.dim == 0 else part.contiguous()
        blocks = self._blocks(weight).index_select(self.dim, self._index(weight.device))
        return blocks.flatten(self.dim, self.dim + 1)

    def add_to(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """whole[cut] += part, in the dtype of `whole`."""
        if self.is_one_run:
            self._narrow(whole).add_(part)
            return
        blocks = part.unflatten(self.dim, (len(self.index), self.block)).to(whole.dtype)
        self._blocks(whole).index_add_(self.dim, self._index(whole.device), blocks)

    def _narrow(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.narrow(self.dim, self.index[0] * self.block, len(self.index) * self.block)

    def _blocks(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(self.dim, (-1, self.block))

    def _index(self, device: torch.device) -> torch.Tensor:
        if not self._tensor:
            self._tensor.append(torch.tensor(self.index, device=device))
        return self._tensor[0]

    def idle(self, size: int) -> "Cut | None":
        """The blocks of a dimension of `size` elements that this cut leaves; None when there are none."""
        rest = tuple(sorted(set(range(size // self.block)) - set(self.index)))
        return Cut(self.dim, self.block, rest) if rest else None


class _TakeSlice(torch.autograd.Function):
    """The slice as a function of the full parameter, without touching the full parameter's size."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        weight: torch.nn.Parameter,
        part: torch.Tensor,
        cut: Cut,
    ) -> torch.Tensor:
        ctx.cut, ctx.weight = cut, weight
        return part.detach()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor):
        weight = ctx.weight
        if not hasattr(weight, "main_grad"):
            whole = torch.zeros_like(weight)
            ctx.cut.add_to(whole, grad)
            return whole, None, None
        ctx.cut.add_to(weight.main_grad, grad)
        # Megatron's mark for "already in main_grad": the hook adds nothing, but counts the parameter as
        # ready. The tensor that makes it fire is never read; its memory is not even touched.
        weight.grad_added_to_main_grad = True
        return torch.empty_like(weight), None, None


class SlicedParameter:
    """One parameter's slice: set per plan, gathered at first use in a step, reused until `renew`."""

    def __init__(self) -> None:
        self.cut: Cut | None = None
        self._part: torch.Tensor | None = None

    def set_cut(self, cut: Cut | None) -> None:
        """None: the whole parameter."""
        self.cut, self._part = cut, None

    def renew(self) -> None:
        """Gather again at the next use: the weights have changed."""
        self._part = None

    def of(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """The parameter itself, or its slice, differentiable."""
        if self.cut is None:
            return weight
        if self._part is None:
            with torch.no_grad():
                self._part = self.cut.take(weight)
        return _TakeSlice.apply(weight, self._part, self.cut)


class _OnBackward(torch.autograd.Function):
    """Identity whose backward makes a call first."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ctx.call()
        return grad, None


def on_backward(x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    """`x`; `call` runs when its gradient has been computed."""
    return _OnBackward.apply(x, call)
