"""Adam's state in one canonical form, whatever optimizer class holds it.

On disk every model parameter `KEY` has `optimizer.state.exp_avg.KEY`, `optimizer.state.exp_avg_sq.KEY`
and, in bf16, the fp32 main weights `optimizer.state.param.KEY`, each of the parameter's own (global)
shape. So a checkpoint of the plain optimizer loads into the distributed one and the other way round,
under any TP, PP and DP.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_tlt import mcore
from megatron_tlt.train.optimizer import inner_optimizers

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

Sharded = ShardedTensor | ShardedTensorFactory
_MOMENTS = ("exp_avg", "exp_avg_sq")


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, sharded_params: dict[torch.nn.Parameter, Sharded]
) -> dict[str, Sharded]:
    """Every optimizer tensor, to be saved (a collective over DP where the distributed optimizer's
    shards have to be gathered). The dictionary's own keys are local; what is on disk is `ShardedTensor.key`
    and, for layers, which share a key, the layer's place in the stacked tensor."""
    state: dict[str, Sharded] = {}
    for part in _parts(optimizer):
        owned = (
            _gathered_state(part)
            if isinstance(part, DistributedOptimizer)
            else _plain_state(part)
        )
        for number, (param, tensors) in enumerate(owned):
            for name in _wanted(part):
                state[f"{number}.{name}"] = _like(sharded_params[param], name, tensors[name])
    return state


def requested_optimizer_state(
    optimizer: MegatronOptimizer, sharded_params: dict[torch.nn.Parameter, Sharded]
) -> dict[str, Sharded]:
    """The same names with zeroed tensors of each parameter's local shape, to be filled by a load."""
    numbers = {param: number for number, param in enumerate(sharded_params)}
    return {
        f"{numbers[param]}.{name}": _like(
            sharded_params[param], name, torch.zeros_like(param, dtype=torch.float32)
        )
        for part in _parts(optimizer)
        for param in _model_params(part)
        for name in _wanted(part)
    }


def load_optimizer_state(
    optimizer: MegatronOptimizer,
    sharded_params: dict[torch.nn.Parameter, Sharded],
    loaded: dict[str, torch.Tensor],
    *,
    step: int,
) -> None:
    """Copy the loaded tensors (this rank's whole parameters) into the optimizer, and Adam's `step`.

    What `loaded` lacks (a checkpoint of selected tensors) stays as it is."""
    numbers = {param: number for number, param in enumerate(sharded_params)}
    for part in _parts(optimizer):
        distributed = isinstance(part, DistributedOptimizer)
        owned = _distributed_state(part) if distributed else _plain_state(part)
        for param, tensors in owned:
            for name in _wanted(part):
                source = loaded.get(f"{numbers[param]}.{name}")
                if source is None:
                    continue
                if distributed:
                    source = source.view(-1)[_owned_range(part, param)]
                tensors[name].copy_(source)
        if distributed and "param" not in _wanted(part):
            part.reload_model_params()
    for inner in inner_optimizers(optimizer):
        mcore.ensure_adam_state(inner)
        for state in inner.state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], float(step))
        for group in inner.param_groups:
            if "step" in group:  # Apex and TE count per group
                group["step"] = step


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """How many updates Adam has made (0 on a rank without parameters)."""
    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            if "step" in state:
                return int(state["step"])
        for group in inner.param_groups:
            if "step" in group:
                return int(group["step"])
    return 0


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if part.optimizer is not None]


def _wanted(part: MegatronOptimizer) -> tuple[str, ...]:
    """fp32 weights are saved as the model's; only bf16 has main weights of its own."""
    return ("param", *_MOMENTS) if part.config.bf16 else _MOMENTS


def _model_params(part: MegatronOptimizer) -> Iterator[torch.nn.Parameter]:
    if isinstance(part, DistributedOptimizer):
        for buffer in part.buffers:
            yield from buffer.param_index_map
    else:
        for param, _ in _plain_state(part):
            yield param


def _plain_state(
    part: MegatronOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """(model parameter, its tensors) of the optimizers that hold whole parameters."""
    if isinstance(part, FP32Optimizer):
        pairs = [(p, p) for group in part.optimizer.param_groups for p in group["params"]]
    else:
        pairs = [
            pair
            for model, main in zip(
                part.float16_groups + part.fp32_from_fp32_groups,
                part.fp32_from_float16_groups + part.fp32_from_fp32_groups,
                strict=True,
            )
            for pair in zip(model, main, strict=True)
        ]
    for model, main in pairs:
        state = part.optimizer.state[main]
        yield model, {"param": main.data, **{name: state[name] for name in _MOMENTS}}


def _distributed_state(
    part: DistributedOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """(model parameter, this rank's flat shards) of the parameters that this rank owns a part of."""
    for param in part.model_param_group_index_map:
        yield param, part._get_main_param_and_optimizer_states(param)


def _gathered_state(
    part: DistributedOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """(model parameter, its whole tensors) on the first data-parallel rank, which is the one that saves;
    a memory-less stand-in of the right shape on the others. Collective over the data-parallel group.

    megatron-core's own gathering pads the last parameter of a buffer with zeros where the buffer's
    padding was counted wrongly, and so loses moments (its issue #504).
    """
    shards = dict(_distributed_state(part))
    group = part.data_parallel_group
    first = dist.get_global_rank(group, 0)
    for param in _model_params(part):
        tensors = {}
        for name in _wanted(part):
            whole = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
            if param in shards:
                whole.view(-1)[_owned_range(part, param)] = shards[param][name]
            # Ranges do not overlap, so the sum puts each owner's numbers in place, bit for bit.
            dist.reduce(whole, dst=first, group=group)
            tensors[name] = whole if group.rank() == 0 else whole.new_zeros(1).expand(param.shape)
        yield param, tensors


def _owned_range(part: DistributedOptimizer, param: torch.nn.Parameter) -> slice:
    owned = part._get_model_param_range_map(param)["param"]
    return slice(owned.start, owned.end)


def _like(sharded: Sharded, name: str, data: torch.Tensor) -> Sharded:
    """The sharding of a parameter, for one of its optimizer tensors."""
    key = f"optimizer.state.{name}.{sharded.key}"
    if isinstance(sharded, ShardedTensorFactory):
        return replace(sharded, key=key, data=data)
    return replace(sharded, key=key, data=data, dtype=data.dtype)
