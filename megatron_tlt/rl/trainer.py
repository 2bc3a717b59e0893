"""The policy's side of a step: log-probabilities, advantages, updates, under any TP, PP and DP.

One forward pass scores the responses with the policy that generated them (old log-probabilities, which are
compared with the engine's), one with the reference where a KL coefficient asks for it, and each update is a
forward and backward pass over packed micro-batches. Everything that layouts could change is divided by counts
of the global batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_tlt.models.gpt import GPT
from megatron_tlt.ops.log_probs import (
    at_temperature,
    vocab_parallel_entropy,
    vocab_parallel_log_probs,
)
from megatron_tlt.ops.policy_loss import GlobalCounts, kl_penalty
from megatron_tlt.parallel import Parallel
from megatron_tlt.rl.algorithms import (
    AlgorithmConfig,
    sequence_advantages_of,
    token_advantages_of,
)
from megatron_tlt.rl.batch import Shard, TrainBatch
from megatron_tlt.rl.metrics import check_mismatch, mismatch_metrics, mismatch_sums
from megatron_tlt.rl.policy_loss import PolicyTokens, policy_loss
from megatron_tlt.train.optimizer import gathered_parameters
from megatron_tlt.train.packed import PackedStep, packed_train_step, run_packed

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

Metrics = dict[str, float]


class NonFiniteUpdateError(RuntimeError):
    """Loss or gradient norm is NaN or infinite; the update was not made."""


@dataclass(kw_only=True, slots=True)
class PolicyTrainer:
    """One policy, one optimizer, perhaps a frozen reference."""

    config: AlgorithmConfig
    parallel: Parallel
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    vocab_size: int
    temperature: float
    """Sampling temperature: log-probabilities are those of the distribution that was drawn from."""
    num_epochs: int
    reference: list[GPT] | None
    """None: no KL is asked for."""
    reuse_forward: bool = True
    """With a single update a step, take old log-probabilities from its own forward pass."""

    def score(self, batch: TrainBatch) -> Metrics:
        """Fill old and reference log-probabilities; returns how the old ones compare with the engine's.

        Where the update's own forward pass gives the old ones (`scores_while_updating`), `update` fills and
        compares them. Collective over the world. Raises MismatchError on every rank.
        """
        shards, metrics = batch.shards, {}
        if not self.scores_while_updating(batch):
            metrics = self.compare(batch)
            check_mismatch(metrics, threshold=self.config.max_logprob_diff)
        if self.reference is not None:
            for shard in shards:
                shard.ref_log_probs = torch.zeros_like(shard.mask)
            for shard, (log_probs, _) in zip(shards, self._forward(self.reference, shards)):
                shard.ref_log_probs = log_probs
        return metrics

    def compare(self, batch: TrainBatch) -> Metrics:
        """Fill old log-probabilities by a forward pass; how they compare with the engine's. Collective over
        the world."""
        shards = batch.shards
        with gathered_parameters(self.chunks):
            scored = self._forward(self.chunks, shards)
        for shard in shards:
            shard.old_log_probs = shard.entropy = torch.zeros_like(shard.mask)
        for shard, (log_probs, entropy) in zip(shards, scored):
            shard.old_log_probs, shard.entropy = log_probs, entropy
        return self._score_metrics(shards if scored else [])

    def scores_while_updating(self, batch: TrainBatch) -> bool:
        """Whether old and new policy are the same in the only forward pass of the step.

        Not with several updates or epochs, with KL in the reward (it is needed before), or with dropout.
        """
        model = self.chunks[0].config
        return (
            self.reuse_forward
            and self.num_epochs == len(batch.updates) == 1
            and self.config.kl_coef == 0
            and model.hidden_dropout == model.attention_dropout == 0
        )

    @torch.no_grad()
    def _forward(
        self, chunks: list, shards: list[Shard]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(log-probabilities, entropy) `[b, s]` of each shard, on the last stage; [] on the others."""
        group = self.parallel.groups.tp

        def function(number: int, logits: torch.Tensor):
            logits = at_temperature(logits, self.temperature)
            entropy = vocab_parallel_entropy(logits, vocab_size=self.vocab_size, group=group)
            log_probs = vocab_parallel_log_probs(
                logits, shards[number].batch.labels, vocab_size=self.vocab_size, group=group
            )
            return log_probs.sum(), (log_probs, entropy)

        for chunk in chunks:
            chunk.eval()
        batches = [shard.batch for shard in shards]
        return run_packed(chunks, batches, function, parallel=self.parallel, forward_only=True)

    def _score_metrics(self, shards: list[Shard]) -> Metrics:
        """Of `shards`, none off the last stage; collective over the world."""
        sums = torch.zeros(5, dtype=torch.float64)
        extra = {"tokens": 0.0, "log_probs": 0.0, "entropy": 0.0, "ref_log_probs": 0.0, "kl": 0.0}
        for shard in shards:
            present = shard.batch.response_mask > 0
            old, entropy = shard.old_log_probs, shard.entropy
            found = mismatch_sums(old, shard.rollout_log_probs, shard.batch.response_mask).cpu()
            largest = torch.maximum(sums[4], found[4])
            sums += found
            sums[4] = largest
            extra["tokens"] += float(present.sum())
            extra["log_probs"] += float(old[present].sum())
            extra["entropy"] += float(entropy[present].sum())
            if shard.ref_log_probs is not None:
                ref = shard.ref_log_probs
                extra["ref_log_probs"] += float(ref[present].sum())
                extra["kl"] += float(kl_penalty(old, ref, kind="k3")[present].sum())
        everyone = self._gather((sums.tolist(), extra))
        totals = [sum(x) for x in zip(*(s[:4] for s, _ in everyone))]
        metrics = mismatch_metrics([*totals, max(s[4] for s, _ in everyone)])
        total = {name: sum(e[name] for _, e in everyone) for name in extra}
        tokens = max(total.pop("tokens"), 1.0)
        metrics |= {
            "rollout/log_probs": total["log_probs"] / tokens,
            "train/entropy": total["entropy"] / tokens,
        }
        if self.reference is not None:
            metrics["rollout/ref_log_probs"] = total["ref_log_probs"] / tokens
            metrics["rollout/kl"] = total["kl"] / tokens
        return metrics

    def fill_advantages(self, batch: TrainBatch) -> Metrics:
        """Rewards, and KL where it is part of them, to an advantage at each token; collective over DP."""
        shards, dp = batch.shards, self.parallel.groups.dp
        mine = [i for shard in shards for i in shard.batch.indices]
        kl_of, kl_sums = self._reward_kl(batch, shards)
        if kl_sums is not None:
            dist.all_reduce(kl_sums, group=dp)
            kl_sums = kl_sums.cpu()

        def over_ranks(value: torch.Tensor) -> torch.Tensor:
            value = value.to(shards[0].mask.device)
            dist.all_reduce(value, group=dp)
            return value.cpu()

        advantages = sequence_advantages_of(
            self.config, batch.shaped, batch.groups, kl_sums=kl_sums
        )
        lengths = batch.lengths[mine]
        values = token_advantages_of(
            self.config,
            advantages[mine],
            batch.shaped.counted[mine],
            lengths,
            kl=kl_of,
            sum_over_ranks=over_ranks,
        )
        pieces = iter(values.split(lengths.tolist()))
        for shard in shards:
            shard.advantages = shard.batch.scatter([next(pieces) for _ in shard.batch.indices])
        counted = advantages[batch.shaped.counted]
        return {
            "rollout/advantages/mean": float(counted.mean()) if len(counted) else 0.0,
            "rollout/advantages/max": float(counted.max()) if len(counted) else 0.0,
            "rollout/advantages/min": float(counted.min()) if len(counted) else 0.0,
        }

    def _reward_kl(
        self, batch: TrainBatch, shards: list[Shard]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(KL of each of this rank's tokens `[t]`, sums `[r]` with this rank's responses filled in)."""
        if self.config.kl_coef == 0:
            return None, None
        sums, pieces = torch.zeros(len(batch.samples), device=shards[0].mask.device), []
        for shard in shards:
            kl = kl_penalty(
                shard.old_log_probs, shard.ref_log_probs, kind=self.config.kl_reward_type
            )
            for index, piece in zip(shard.batch.indices, shard.batch.gather(kl), strict=True):
                sums[index] = piece.sum()
                pieces.append(piece.cpu())
        return torch.cat(pieces) if pieces else sums[:0].cpu(), sums

    def update(self, batch: TrainBatch) -> Metrics:
        """All optimizer updates of a step; metrics are means over them. Collective over the world.

        Raises NonFiniteUpdateError on every rank, before the update that would have been wrong.
        """
        for chunk in self.chunks:
            chunk.train()
        if self.scores_while_updating(batch):
            return self._update_and_score(batch)
        results: list[Metrics] = []
        for _ in range(self.num_epochs):
            for shards, counts in zip(batch.updates, batch.counts, strict=True):
                results.append(self._update(shards, counts))
        names = dict.fromkeys(name for result in results for name in result)
        return {
            f"train/{name}": sum(r.get(name, 0.0) for r in results) / len(results) for name in names
        }

    def _update_and_score(self, batch: TrainBatch) -> Metrics:
        """The only update of a step, which compares with the engine before the optimizer steps."""
        (shards,), (counts,), scores = batch.updates, batch.counts, {}

        def too_different(reports: list) -> bool:
            scores.update(self._score_metrics(shards if reports else []))
            limit = self.config.max_logprob_diff
            return limit > 0 and not scores["train/train_rollout_logprob_abs_diff"] <= limit

        metrics = self._update(shards, counts, veto=too_different)
        check_mismatch(scores, threshold=self.config.max_logprob_diff)
        return {f"train/{name}": value for name, value in metrics.items()} | scores

    def _update(
        self,
        shards: list[Shard],
        counts: GlobalCounts,
        *,
        veto: Callable[[list], bool] | None = None,
    ) -> Metrics:
        step = packed_train_step(
            self.chunks,
            self.optimizer,
            [shard.batch for shard in shards],
            lambda number, logits: self._loss(shards[number], counts, logits),
            parallel=self.parallel,
            veto=veto,
        )
        metrics = self._sum_reports(step)
        if not step.finite:
            raise NonFiniteUpdateError(
                f"loss {metrics.get('loss')}, gradient norm {step.grad_norm}: the update was not made"
            )
        if step.updated:
            self.scheduler.step(increment=1)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return metrics | {"grad_norm": step.grad_norm, "lr": max(rates, default=0.0)}

    def _loss(
        self, shard: Shard, counts: GlobalCounts, logits: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This micro-batch's share of the loss and of the metrics; logits `[b, s, v/t]`."""
        group, entropy = self.parallel.groups.tp, None
        logits = at_temperature(logits, self.temperature)
        first_sight = shard.old_log_probs is None
        if self.config.entropy_coef > 0:
            entropy = vocab_parallel_entropy(logits, vocab_size=self.vocab_size, group=group)
        if first_sight:
            shard.entropy = vocab_parallel_entropy(
                logits.detach(), vocab_size=self.vocab_size, group=group
            )
        log_probs = vocab_parallel_log_probs(
            logits, shard.batch.labels, vocab_size=self.vocab_size, group=group
        )
        if first_sight:
            shard.old_log_probs = log_probs.detach().clone()
        tokens = PolicyTokens(
            log_probs=log_probs,
            old_log_probs=shard.old_log_probs,
            advantages=shard.advantages,
            mask=shard.mask,
            segments=shard.batch.segments,
            rollout_log_probs=shard.rollout_log_probs,
            ref_log_probs=shard.ref_log_probs,
            entropy=entropy,
        )
        return policy_loss(self.config, tokens, counts)

    def _sum_reports(self, step: PackedStep) -> Metrics:
        """Shares add up over micro-batches and replicas."""
        mine: Metrics = {}
        for report in step.reports:
            for name, value in report.items():
                mine[name] = mine.get(name, 0.0) + float(value)
        total: Metrics = {}
        for part in self._gather(mine):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _gather(self, mine: object) -> list:
        """The values of the ranks that have results: last stage, first TP rank, one a replica."""
        parallel, everyone = self.parallel, [None] * self.parallel.world_size
        has = parallel.is_last_stage and parallel.tp_rank == 0
        dist.all_gather_object(everyone, mine if has else None)
        return [value for value in everyone if value is not None]

    def refresh_reference(self) -> None:
        """The reference becomes the present policy."""
        if self.reference is not None:
            copy_weights(self.chunks, self.reference)


@torch.no_grad()
def copy_weights(source: Iterable[DistributedDataParallel], target: Iterable[GPT]) -> None:
    """Parameters of the wrapped `source` chunks into the bare `target` chunks of the same layout."""
    with gathered_parameters(list(source)):
        for ours, theirs in zip(source, target, strict=True):
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                other.copy_(mine)
