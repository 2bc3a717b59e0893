"""Before the first step on an engine beside the trainer: the same log-probabilities, drafts that fit."""

from dataclasses import replace

from megatron_tlt.data.rewards import RewardResult
from megatron_tlt.rl.batch import BatchLayout, build_train_batch
from megatron_tlt.rl.dump import Sample
from megatron_tlt.rl.schedule import Replica, gather_everywhere
from megatron_tlt.rl.setup import RlRun
from megatron_tlt.rollout.sglang.engine import SglangEngine
from megatron_tlt.rollout.sglang.probe import probe_engine
from megatron_tlt.rollout.sglang.shared import SharedEngine
from megatron_tlt.types import Rollout

import torch

_TOKENS = 32
# Of one token; bfloat16 rounds at other places in two implementations, other weights differ by whole nats.
_MAX_DIFF = {torch.float32: 1e-2, torch.bfloat16: 0.5}
_ACCEPTED = 1.05


def probe(run: RlRun) -> dict[str, float]:
    """A prompt through each rank's SGLang and through the trainer; {} with the embedded engine.

    A drafter that was trained elsewhere (`drafter.path`) must have drafts accepted. Collective over the
    world. Raises ValueError that says what does not fit.
    """
    if not isinstance(run.engine, SglangEngine | SharedEngine):
        return {}
    records = run.collector.prompts.records
    prompt = records[Replica.of(run.parallel).index % len(records)].prompt
    limit = min(_TOKENS, run.config.rollout.max_response_len)
    trained = run.config.drafts and run.config.drafter.path and not run.state.iteration
    return probe_engine(
        run.engine,
        prompt.tokens,
        difference=lambda rollout: _difference(run, rollout),
        params=replace(run.collector.params, n=1, max_tokens=limit),
        max_log_prob_diff=_MAX_DIFF[run.config.training.params_dtype],
        min_accept_length=_ACCEPTED if trained else 1.0,
    )


def _difference(run: RlRun, rollout: Rollout) -> float:
    """The largest difference at a token of any rank's response; collective over the world."""
    mine = Sample(group=0, rollout=rollout, reward=RewardResult(score=0.0))
    samples = gather_everywhere([mine], run.parallel)
    layout = BatchLayout(
        global_batch_size=len(samples),
        max_tokens=run.config.training.max_tokens_per_gpu,
        max_response_len=run.config.rollout.max_response_len,
    )
    batch = build_train_batch(samples, run.config.algorithm, layout, parallel=run.parallel)
    return run.trainer.compare(batch)["train/train_rollout_logprob_abs_diff_max"]
