"""What the ranks of the rollout tests run: an engine over the tensor-parallel group."""

import torch

from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.native.model import TensorParallel
from megatron_tlt.types import OFF, EngineStats, Rollout, SamplingParams
from tests.unit.rollout_models import (
    CHAIN,
    HYBRID,
    NGRAM,
    PROMPTS,
    SUBNET,
    TREE,
    Alternate,
    make_drafter,
    reference,
)

SWITCHING = (OFF, NGRAM, CHAIN, TREE, SUBNET, HYBRID)


def generate(kind: str, params: SamplingParams, size: int) -> tuple[list[Rollout], EngineStats]:
    """Every strategy in turn, in a cache that preempts; the ranks' policies disagree on purpose."""
    torch.set_num_threads(1)
    tp, rank = None, 0
    if size > 1:
        parallel = init_parallel(ParallelConfig(tensor_model_parallel_size=size), seed=0)
        tp, rank = TensorParallel(parallel.groups.tp), parallel.tp_rank
    model, drafter = reference(kind), make_drafter(kind)
    config = NativeEngineConfig(max_model_len=100, max_batch=8, kv_cache_bytes=300_000 // size)
    policy = Alternate(*SWITCHING[rank:], *SWITCHING[:rank])
    engine = NativeEngine(
        model.config.to_dict(), config, tp=tp, policy=policy, drafter=drafter.config
    )
    engine.update_weights("target", model.state_dict().items(), version=1)
    engine.update_weights("draft", drafter.state_dict().items(), version=1)
    return engine.generate(PROMPTS, params), engine.stats()
