"""From prompts to scored samples: generation on all engines, rewards while others still generate.

Rewards are submitted as responses finish, so that verifiers run beside the engine; what is still missing when
the last response ends is waited for in a phase of its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_tlt.data.prompts import PromptCursor, PromptRecord, PromptSet, response_text
from megatron_tlt.data.reward_workers import RewardScorer
from megatron_tlt.data.rewards import (
    RewardConfig,
    RewardRequest,
    check_error_rate,
    choose_reward,
)
from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.parallel import Parallel
from megatron_tlt.rl.algorithms import AlgorithmConfig, choose_groups, fill_batch, shape_rewards
from megatron_tlt.rl.drafting import Drafting
from megatron_tlt.rl.dump import Sample, in_order
from megatron_tlt.rl.engine_trace import RolloutTrace
from megatron_tlt.rl.phases import Phase, PhaseClock
from megatron_tlt.rl.schedule import (
    FeedMaker,
    LengthPredictor,
    Replica,
    fair_slots,
    gather_everywhere,
    generate_from,
)
from megatron_tlt.rollout.engine import RolloutEngine
from megatron_tlt.train.stop import Interrupted, StopRequests
from megatron_tlt.types import Prompt, Rollout, SamplingParams

import torch

# Added to the number of a prompt that stands in a batch again, for its samples to differ from the first ones.
_AGAIN = 1 << 32


@dataclass(kw_only=True, slots=True)
class Generator:
    """Generates on this rank's engine together with the other ranks; every method is collective."""

    engine: RolloutEngine
    parallel: Parallel
    tokenizer: Tokenizer
    rewards: RewardConfig
    scorer: RewardScorer
    feeds: FeedMaker
    predictor: LengthPredictor
    slots: int
    """Responses that an engine has under way while prompts are left in the queue."""
    offloads: bool
    """Give the engine's memory back between two runs."""
    clock: PhaseClock
    drafting: Drafting
    """Learns from the responses; takes the time from the last own one to the last of all ranks."""
    trace: RolloutTrace
    """Keeps decode steps and requests for the timeline."""
    stop: StopRequests = field(default_factory=StopRequests)
    """A signal that it noted ends the rollout."""

    def run(
        self,
        records: Sequence[PromptRecord],
        params: SamplingParams,
        *,
        step: int,
        phases: tuple[Phase, Phase] = ("generate", "reward"),
    ) -> list[Sample]:
        """`params.n` scored samples of each record, in the order of `records`, the same on every rank.

        Raises on every rank: VerifierError when too many rewards could not be computed, Interrupted when a
        signal came, which ends the rollout at the next finished response.
        """
        prompts = _numbered(records)
        group_of = {prompt.prompt_id: group for group, prompt in enumerate(prompts)}
        rollouts, tickets = [], []
        with self.clock(phases[0]):
            self.engine.resume_memory_occupation()
            self.drafting.begin(step)
            self.trace.begin(step)
            feed = self.feeds(self.predictor.order(prompts))
            slots = fair_slots(self.slots, len(prompts), params.n, Replica.of(self.parallel))
            for rollout in generate_from(
                self.engine, feed, params, step=step, slots=slots,
                stopped=lambda: self.stop.signalled(self.parallel.groups.tp),
            ):  # fmt: skip
                rollouts.append(rollout)
                self.trace.observe(rollout)
                self.drafting.collect()
                if self.parallel.tp_rank == 0:
                    record = records[group_of[rollout.prompt_id]]
                    tickets.append(self.scorer.submit(self._request(record, rollout, params)))
            self.trace.end()
            self.drafting.fill_tail()
            if self.offloads:
                self.engine.release_memory_occupation()
            with self.clock.timeline.span("wait"):  # for the ranks that still generate
                interrupted = self.stop.interrupted()
        if interrupted:
            raise Interrupted(self.stop.reason)
        with self.clock(phases[1]):
            results = self.scorer.collect(tickets)
            mine = [
                Sample(group=group_of[rollout.prompt_id], rollout=rollout, reward=result)
                for rollout, result in zip(rollouts, results)
            ]
            with self.clock.timeline.span("wait"):
                samples = in_order(gather_everywhere(mine, self.parallel))
        wanted = [(group, i) for group in range(len(records)) for i in range(params.n)]
        assert [(s.group, s.rollout.sample_index) for s in samples] == wanted, "a response is missing"
        self.predictor.observe([s.rollout for s in samples])
        self.drafting.weigh(
            {(s.rollout.prompt_id, s.rollout.sample_index): s.reward.score for s in samples}
        )
        errors = [s.reward.error for s in samples if s.reward.error]
        check_error_rate(
            len(errors), len(samples), max_error_rate=self.rewards.max_error_rate, examples=errors
        )
        return samples

    def _request(
        self, record: PromptRecord, rollout: Rollout, params: SamplingParams
    ) -> RewardRequest:
        return RewardRequest(
            reward=choose_reward(self.rewards, own=record.reward, data_source=record.data_source),
            response=response_text(self.tokenizer, rollout.tokens, params.stop_token_ids),
            label=record.label,
            data_source=record.data_source,
            metadata=record.metadata,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """The samples of a step and what was dropped on the way. Example: drops {"zero_std_1": 3}."""

    samples: list[Sample]
    drops: dict[str, int]
    """Groups without spread that dynamic sampling replaced, by reason."""
    num_rounds: int


@dataclass(kw_only=True, slots=True)
class Collector:
    """Takes prompts from the cursor until a step has its groups."""

    generator: Generator
    algorithm: AlgorithmConfig
    prompts: PromptSet
    cursor: PromptCursor
    params: SamplingParams
    rollout_batch_size: int
    max_response_len: int

    def collect(self, *, step: int) -> Collection:
        """One step's samples, grouped and numbered 0 .. rollout_batch_size - 1.

        With dynamic sampling, groups whose rewards are all equal are replaced by those of further prompts,
        for at most max_num_gen_batches rounds; then such groups fill the batch, so its size never changes.
        """
        dynamic, wanted = self.algorithm.dynamic_sampling, self.rollout_batch_size
        groups: dict[int, list[Sample]] = {}
        kept: list[int] = []
        flat: list[int] = []
        drops: Counter[str] = Counter()
        rounds = 0
        while len(kept) < wanted and rounds < (self.algorithm.max_num_gen_batches if dynamic else 1):
            records = [self.prompts.records[i] for i in self.cursor.take(wanted)]
            samples = self.generator.run(
                records, replace(self.params, seed=self.params.seed + rounds), step=step
            )
            first = rounds * wanted
            for sample in samples:
                groups.setdefault(first + sample.group, []).append(sample)
            rounds += 1
            if not dynamic:
                kept = list(groups)
                continue
            choice = self._choose(samples)
            kept += [first + name for name in choice.kept]
            flat += [first + name for name in choice.flat]
            drops.update(choice.drops)
        chosen = fill_batch(kept, flat, wanted=wanted)
        samples = [
            replace(sample, group=number)
            for number, name in enumerate(chosen)
            for sample in groups[name]
        ]
        return Collection(samples=samples, drops=dict(drops), num_rounds=rounds)

    def _choose(self, samples: list[Sample]):
        """Dynamic sampling looks at the rewards that will be trained on."""
        shaped = shape_rewards(
            self.algorithm,
            torch.tensor([s.reward.score for s in samples]),
            torch.tensor([len(s.rollout.tokens) for s in samples]),
            torch.tensor([s.truncated for s in samples]),
            max_length=self.max_response_len,
            usable=torch.tensor([s.usable for s in samples]),
        )
        return choose_groups(
            shaped.rewards, torch.tensor([s.group for s in samples]), shaped.counted
        )


def _numbered(records: Sequence[PromptRecord]) -> list[Prompt]:
    """The records' prompts; one that stands there again has another number, so that its samples differ."""
    prompts, seen = [], Counter()
    for record in records:
        again = seen[record.prompt.prompt_id]
        seen[record.prompt.prompt_id] += 1
        number = record.prompt.prompt_id + again * _AGAIN
        prompts.append(replace(record.prompt, prompt_id=number))
    return prompts
