"""`idle_params: frozen`: the optimizer leaves the weights outside the subnet alone.

Megatron's optimizers step every parameter, those without a gradient with gradient zero: momentum moves
and weight decay shrinks them. Here hooks around the optimizer's step take parameters of skipped layers
out of it, and put idle parts of the others, with their moments, back as they were. (Adam's step count
stays common to all parameters: the bias correction of idle weights goes on.)
"""

from dataclasses import dataclass

from megatron_tlt.subnet.cuts import Cut

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedParameter:
    """What an optimizer of this rank steps: `main` holds the elements start to end of `model`, flat."""

    model: torch.nn.Parameter
    main: torch.Tensor
    optimizer: torch.optim.Optimizer
    start: int
    end: int


class IdleFreezer:
    """Keeps idle elements of this rank's parameters, main weights and moments through an update."""

    def __init__(self, owned: list[OwnedParameter]) -> None:
        self._owned = {param.model: param for param in owned}
        self._wholly: list[OwnedParameter] = []
        self._partly: list[tuple[OwnedParameter, torch.Tensor]] = []
        self._saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for optimizer in dict.fromkeys(param.optimizer for param in owned):
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def set_idle(
        self, *, skipped: list[torch.nn.Parameter], parts: dict[torch.nn.Parameter, Cut]
    ) -> None:
        """From now on: parameters of layers that do not run, and of others the blocks that do."""
        self._wholly = [self._owned[param] for param in skipped if param in self._owned]
        self._partly = [
            (self._owned[param], _idle_mask(self._owned[param], cut))
            for param, cut in parts.items()
            if param in self._owned
        ]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for param in self._wholly:
            if param.optimizer is optimizer:
                param.main.grad = None
        for param, mask in self._partly:
            if param.optimizer is optimizer:
                for tensor in _tensors(param):
                    flat = tensor.detach().view(-1)
                    self._saved.append((flat, mask, flat[mask]))

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for flat, mask, values in self._saved:
            flat[mask] = values
        self._saved.clear()
        for param in self._wholly:
            if param.optimizer is optimizer and "step" in optimizer.state[param.main]:
                optimizer.state[param.main]["step"] += 1


def _idle_mask(param: OwnedParameter, cut: Cut) -> torch.Tensor:
    mask = torch.ones(param.model.shape, dtype=torch.int8, device=param.model.device)
    kept = torch.full_like(cut.take(mask), -1)
    cut.add_to(mask, kept)
    return mask.view(-1)[param.start : param.end].bool()


def _tensors(param: OwnedParameter) -> list[torch.Tensor]:
    """The main weights and their moments."""
    state = param.optimizer.state[param.main]
    moments = [x for x in state.values() if torch.is_tensor(x) and x.numel() == param.main.numel() > 1]
    return [param.main, *moments]
