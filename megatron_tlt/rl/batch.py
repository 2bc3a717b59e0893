"""A step's responses laid out for training: who computes which, in which micro-batch, what is known of them.

Every rank holds all samples as numbers and finds the same plan; tensors exist for this rank's share alone.

A response whose advantage is exactly 0 (its group's rewards are all equal, or it does not count) adds exactly
nothing to the gradient of a loss without KL and entropy. Such responses are counted, in what the loss is
divided by, but not computed: where the policy mostly solves or mostly fails a prompt, half of all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tlt.ops.packing import MicroBatch, PackingStats, packing_stats, plan_micro_batches
from megatron_tlt.ops.policy_loss import GlobalCounts
from megatron_tlt.parallel import Parallel
from megatron_tlt.rl.algorithms import (
    AlgorithmConfig,
    ShapedRewards,
    sequence_advantages_of,
    shape_rewards,
)
from megatron_tlt.rl.dump import Sample
from megatron_tlt.train.packed import build_micro_batches

import torch


@dataclass(kw_only=True, slots=True)
class Shard:
    """One micro-batch of this rank, and what is known of its tokens; tensors `[b, s]`, float32.

    What the model computed (log-probabilities, entropy) is there on the last pipeline stage only; on the
    others it stays 0, and nothing reads it.
    """

    batch: MicroBatch
    mask: torch.Tensor
    """1 at response tokens that count."""
    rollout_log_probs: torch.Tensor
    advantages: torch.Tensor
    old_log_probs: torch.Tensor | None = None
    """None: not computed yet."""
    entropy: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """The samples of a step. Fields marked `[r]` have one entry a response, on every rank alike."""

    samples: list[Sample]
    groups: torch.Tensor
    """`[r]` int64."""
    lengths: torch.Tensor
    """`[r]` int64, response tokens."""
    shaped: ShapedRewards
    updates: list[list[Shard]]
    """This rank's micro-batches of each optimizer update."""
    counts: list[GlobalCounts]
    """Of each update, over all ranks."""
    stats: PackingStats
    """Of the first update."""
    num_left_out: int
    """Responses that no rank computes."""

    @property
    def shards(self) -> list[Shard]:
        return [shard for update in self.updates for shard in update]

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all samples."""
        return sum(len(s.rollout.prompt_tokens) + len(s.rollout.tokens) for s in self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLayout:
    """How a step's samples are cut."""

    global_batch_size: int
    """Responses per optimizer update."""
    max_tokens: int
    """Tokens per micro-batch."""
    max_response_len: int
    packed: bool = True
    """False: one sequence a row (the slow twin)."""
    skip_zero_advantage: bool = False
    """Leave out what has no gradient."""


def build_train_batch(
    samples: Sequence[Sample],
    algorithm: AlgorithmConfig,
    layout: BatchLayout,
    *,
    parallel: Parallel,
) -> TrainBatch:
    """Plan and lay out. Raises ValueError when a sample exceeds `layout.max_tokens`.

    Update u takes the u-th `global_batch_size` samples in their order, so groups stay together.
    """
    prompts = [s.rollout.prompt_tokens for s in samples]
    responses = [s.rollout.tokens for s in samples]
    lengths = torch.tensor([len(r) for r in responses])
    shaped = shape_rewards(
        algorithm,
        torch.tensor([s.reward.score for s in samples]),
        lengths,
        torch.tensor([s.truncated for s in samples]),
        max_length=layout.max_response_len,
        usable=torch.tensor([s.usable for s in samples]),
    )
    sizes = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    groups = torch.tensor([s.group for s in samples])
    teaches = [True] * len(samples)
    if layout.skip_zero_advantage:
        teaches = _have_gradient(algorithm, shaped, groups)
    chunks = parallel.config.num_model_chunks
    plans, counts, stats = [], [], None
    for first in range(0, len(samples), layout.global_batch_size):
        members = range(first, min(first + layout.global_batch_size, len(samples)))
        taken = [i for i in members if teaches[i]]
        cut = [sizes[i] for i in taken]
        plan = plan_micro_batches(
            cut,
            max_tokens=layout.max_tokens,
            num_ranks=parallel.dp_size,
            multiple_of=parallel.config.pipeline_model_parallel_size if chunks > 1 else 1,
        )
        stats = stats or packing_stats(plan, cut, max_tokens=layout.max_tokens)
        plans.append([[taken[i] for i in part] for part in plan[parallel.dp_rank]])
        counts.append(_count(shaped, lengths, members, algorithm, layout))
    batches = iter(
        build_micro_batches(
            prompts, responses, [part for plan in plans for part in plan],
            parallel=parallel, packed=layout.packed,
        )
    )  # fmt: skip
    return TrainBatch(
        samples=list(samples),
        groups=groups,
        lengths=lengths,
        shaped=shaped,
        updates=[[_shard(next(batches), samples, shaped) for _ in plan] for plan in plans],
        counts=counts,
        stats=stats,
        num_left_out=teaches.count(False),
    )


def _have_gradient(
    algorithm: AlgorithmConfig, shaped: ShapedRewards, groups: torch.Tensor
) -> list[bool]:
    """Whether each response can move the policy. KL and entropy move it everywhere, and whitening needs the
    moments of all tokens: with one of them every response is computed."""
    if algorithm.needs_reference or algorithm.entropy_coef > 0 or algorithm.normalize_advantages:
        return [True] * len(groups)
    return (sequence_advantages_of(algorithm, shaped, groups) != 0).tolist()


def _count(
    shaped: ShapedRewards,
    lengths: torch.Tensor,
    members: range,
    algorithm: AlgorithmConfig,
    layout: BatchLayout,
) -> GlobalCounts:
    """What this update's loss is divided by; every rank knows all samples, so nobody has to be asked."""
    counted = shaped.counted[members.start : members.stop]
    return GlobalCounts(
        num_tokens=float(lengths[members.start : members.stop][counted].sum()),
        num_sequences=float(counted.sum()),
        max_length=float(algorithm.loss_agg_length or layout.max_response_len),
    )


def _shard(batch: MicroBatch, samples: Sequence[Sample], shaped: ShapedRewards) -> Shard:
    counted = [
        torch.full((length,), float(shaped.counted[i]))
        for i, length in zip(batch.indices, batch.response_lengths, strict=True)
    ]
    rollout = [torch.tensor(samples[i].rollout.log_probs) for i in batch.indices]
    return Shard(
        batch=batch,
        mask=batch.scatter(counted),
        rollout_log_probs=batch.scatter(rollout),
        advantages=batch.scatter([0 * x for x in rollout]),
    )
