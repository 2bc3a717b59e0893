"""Which engine a rank generates with: the embedded one, or SGLang in a process beside it."""

from collections.abc import Mapping
from typing import Any

from megatron_tlt import device
from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.parallel import Parallel
from megatron_tlt.rl.config import RlConfig
from megatron_tlt.rollout.engine import RolloutEngine
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.native.model import TensorParallel
from megatron_tlt.rollout.native.shape import shape_from_hf
from megatron_tlt.rollout.sglang.config import SglangConfig
from megatron_tlt.rollout.sglang.engine import SglangEngine
from megatron_tlt.rollout.sglang.shared import SharedEngine
from megatron_tlt.rollout.sglang.store import TargetTables
from megatron_tlt.rollout.tuner import StrategyPolicy
from megatron_tlt.types import OFF, Strategy

_GIB = 2**30
# What the bandit inside SGLang chooses from; it begins with the chain.
_STEPS = (0, 1, 3, 6)
_CHAIN = Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4)


def build_engine(
    config: RlConfig, parallel: Parallel, target: Mapping[str, Any], *, max_model_len: int,
    policy: StrategyPolicy, drafter: DrafterConfig | None,
) -> RolloutEngine:  # fmt: skip
    """`target`: the policy's `config.json`. Raises ValueError for what the chosen engine cannot do."""
    rollout = config.rollout
    if rollout.engine == "native":
        return NativeEngine(
            target,
            NativeEngineConfig(
                max_model_len=max_model_len,
                max_batch=rollout.max_running_requests,
                kv_cache_bytes=None if rollout.kv_cache_gib is None else int(rollout.kv_cache_gib * _GIB),
                dtype=config.training.params_dtype,
            ),
            tp=TensorParallel(parallel.groups.tp),
            device=device.device(),
            policy=policy,
            drafter=drafter,
        )
    tp = parallel.groups.tp
    if tp.rank() > 0:
        return SharedEngine(None, tp, tables=TargetTables(shape_from_hf(target)))
    engine = SglangEngine(
        target, _sglang_config(config, parallel, max_model_len=max_model_len, drafts=drafter is not None),
        device="cuda" if device.is_cuda() else "cpu", drafter=drafter,
    )  # fmt: skip
    return engine if tp.size() == 1 else SharedEngine(engine, tp)


def _sglang_config(
    config: RlConfig, parallel: Parallel, *, max_model_len: int, drafts: bool
) -> SglangConfig:
    """Of the engine of this rank's tensor-parallel group; on GPUs it takes those of the group's ranks, which
    torchrun numbers one after the other."""
    rollout = config.rollout
    arguments = {"enable_memory_saver": rollout.offloads}
    if device.is_cuda():
        arguments["base_gpu_id"] = device.device().index
    return SglangConfig(
        max_model_len=max_model_len, max_running_requests=rollout.max_running_requests,
        tp_size=parallel.groups.tp.size(), dtype=config.training.params_dtype,
        seed=config.training.seed + parallel.rank, bucket_bytes=rollout.sync_bucket_mib * 2**20,
        weight_transport=rollout.weight_transport, arguments=arguments | rollout.sglang,
        strategy=_CHAIN if drafts else OFF, adaptive_steps=_STEPS if drafts else (),
    )  # fmt: skip


def close_engine(engine: RolloutEngine | None) -> None:
    """End the process of an engine that has one."""
    if isinstance(engine, SglangEngine | SharedEngine):
        engine.close()
