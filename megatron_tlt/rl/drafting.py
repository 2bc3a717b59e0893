"""The drafter beside the policy: lessons while the rank generates, training in the tail, one merged replica.

A step on every rank: `begin`, `collect` as responses finish, `fill_tail` when the own ones are done, and
`publish` after the policy's weights. Only `publish` has collectives, at a place where all ranks meet anyway.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_tlt.draft.batch import pack
from megatron_tlt.draft.buffer import DraftBuffer
from megatron_tlt.draft.export import draft_tensors, import_drafter
from megatron_tlt.draft.merge import merge_replicas, snapshot
from megatron_tlt.draft.spot import SpotMachine, SpotState
from megatron_tlt.draft.state import files_to_save, load_lessons, load_trainer
from megatron_tlt.draft.trainer import DrafterTrainer
from megatron_tlt.draft.trigger import Trigger
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rl.config import DraftingConfig
from megatron_tlt.rl.draft_report import (
    TRAINED,
    DraftReport,
    Tail,
    acceptance_metrics,
    training_metrics,
    trigger_rates,
)
from megatron_tlt.rl.timeline import Timeline
from megatron_tlt.rollout.native.engine import NativeEngine
from megatron_tlt.rollout.sglang.engine import SglangEngine
from megatron_tlt.rollout.sglang.shared import SharedEngine
from megatron_tlt.rollout.tuner import forget_arms

import torch
import torch.distributed as dist

Metrics = dict[str, float]
DraftingEngine = NativeEngine | SglangEngine | SharedEngine
# Between two looks at the counter while there is nothing to do; a store serves some 10,000 looks a second.
_POLL_S, _POLL_S_PER_RANK = 1e-3, 1e-4
# The trained drafter's arms are tried anew when what it brings on its lessons has changed by this much.
_TRY_AGAIN = 0.1


class Drafting(Protocol):
    """What a rollout and the loop call; all of it does nothing without a trained drafter."""

    def begin(self, step: int) -> None:
        """A rollout of `step` begins."""

    def collect(self) -> None:
        """A response has finished on this rank."""

    def fill_tail(self) -> None:
        """This rank's responses are done; returns when those of all ranks are."""

    def weigh(self, rewards: Mapping[tuple[int, int], float]) -> None:
        """Rewards of this step's responses, by (prompt_id, sample_index)."""

    def publish(self) -> Metrics:
        """After the policy's weights: the drafter's. Collective over the world."""

    def state_dict(self) -> dict[str, Any]:
        """Scalars, as JSON; collective over the world."""

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank saves, by file name."""


class NoDrafting:
    """The null object: speculation off and ngram."""

    def begin(self, step: int) -> None: ...

    def collect(self) -> None: ...

    def fill_tail(self) -> None: ...

    def weigh(self, rewards: Mapping[tuple[int, int], float]) -> None: ...

    def publish(self) -> Metrics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}


def build_drafter(config: DraftingConfig, target: Mapping[str, Any], *, seed: int) -> Drafter:
    """The drafter of `config.path`, or a new one, alike on all ranks. Raises ValueError for one that does not
    fit the target with this `config.json`."""
    if config.path is None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Drafter(DrafterConfig.for_target(target, layout=config.layout))
    drafter = import_drafter(config.path, target=target).float()
    if drafter.config.layout != config.layout:
        raise ValueError(
            f"drafter.path={config.path} has layout {drafter.config.layout}: set drafter.layout to it"
        )
    return drafter


class SpotDrafting:
    """A drafter of its own on each rank, alike on all of them between steps.

    With `trains` False (frozen) it drafts and never learns. `machine` tells when to train.
    """

    def __init__(
        self, config: DraftingConfig, drafter: Drafter, engine: DraftingEngine, *, machine: SpotMachine,
        timeline: Timeline, trains: bool, rank: int, seed: int,
    ) -> None:  # fmt: skip
        self.config, self.engine, self.machine, self.timeline = config, engine, machine, timeline
        self.drafter = drafter.to(engine.tables()[0].device)
        self._fresh = config.path is None and config.layout == "eagle3"
        self.drafter.share(*engine.tables())
        self.trainer = DrafterTrainer(self.drafter, config.trainer)
        self.buffer = DraftBuffer(
            config.buffer_rows, seed=seed + 1009 * rank, kept_share=config.kept_share
        )
        self.trigger, self.trains = Trigger(config=config.trigger), trains
        self.version, self.lessons_version, self.tried_at, self._rank = 0, -1, 0.0, rank
        self.loaded, self._why, self._report = False, "", DraftReport()
        self._start = snapshot(self.trainer), 0

    def begin(self, step: int) -> None:
        if not self.trains:
            return
        if step != self.buffer.step:
            self.buffer.begin_step(step)
        self._why = self.trigger.reason(age=self.engine.version - self.lessons_version)
        self.engine.capture_features(self.config.buffer_rows, context_rows=self.config.buffer_rows)
        self.machine.begin()

    def collect(self) -> None:
        if self.trains:
            began = time.perf_counter()
            self.buffer.add(self.engine.take_features())
            self._report.collect_s += time.perf_counter() - began

    def fill_tail(self) -> None:
        """Train while others generate; between two micro-updates look whether they are done."""
        if not self.trains:
            return
        self.engine.capture_features(0)
        self.machine.finish()
        finished, state, update_s = time.time(), SpotState.IDLE, 0.0
        while state != SpotState.READY:
            name = "train_drafter" if state == SpotState.TRAINING else "wait"
            with self.timeline.span(name) as event:
                entered, update_s = state, 0.0
                while state == entered:
                    began = time.perf_counter()
                    if state == SpotState.TRAINING:
                        self._train(event)
                    state = self.machine.poll(has_lessons=self._has_lessons())
                    if entered == SpotState.TRAINING:
                        update_s = time.perf_counter() - began
                    elif state == SpotState.IDLE:
                        time.sleep(max(_POLL_S, _POLL_S_PER_RANK * self.machine.world_size))
        self._report.tails.append(
            Tail(finished_at=finished, noticed_at=time.time(), update_s=update_s)
        )
        self._make_up()

    def _has_lessons(self) -> bool:
        rows = self.buffer.num_rows
        return bool(self._why) and rows > 1 and self._report.tokens < self.config.max_passes * rows

    def _make_up(self) -> None:
        """The updates of `min_updates` that the tail had no time for."""
        began = time.perf_counter()
        if self._why and self.buffer.num_rows > 1 and self._report.updates < self.config.min_updates:
            with self.timeline.span("train_drafter") as event:
                while self._report.updates < self.config.min_updates:
                    self._train(event)
        self._report.forced_s += time.perf_counter() - began

    def _train(self, event: dict) -> None:
        """One bounded update on lessons of this rank."""
        report, samples = self._report, self.buffer.draw(self.config.micro_rows)
        metrics = self.trainer.step(pack(samples).to(self.drafter.fc.weight.device))
        rows = sum(len(sample.hidden) for sample in samples)
        if not report.updates:
            report.first_loss = metrics["loss"]
        report.updates += 1
        report.tokens += rows
        report.loss_sum += metrics["loss"]
        report.accept_sum += metrics["accept_length"]
        report.last_loss = metrics["loss"]
        report.newest_version = max(report.newest_version, *(s.weight_version for s in samples))
        event["updates"] = event.get("updates", 0) + 1
        event["tokens"] = event.get("tokens", 0) + rows
        event["loss"] = metrics["loss"]

    def weigh(self, rewards: Mapping[tuple[int, int], float]) -> None:
        extra = self.config.reward_weight
        if self.trains and extra:
            self.buffer.weigh({key: 1 + extra * max(r, 0.0) for key, r in rewards.items()})

    def publish(self) -> Metrics:
        self._share()
        if not self.loaded:
            self._load()
            return {}
        report, self._report = self._report, DraftReport()
        report.acceptance = self.engine.take_acceptance()
        report.buffer_rows, report.longest = self.buffer.num_rows, max(self.buffer.lengths, default=0)
        reports: list = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        began = time.perf_counter()
        if any(r.updates for r in reports):
            start, iteration = self._start
            merge_replicas(self.trainer, start, tokens=report.tokens, start_iteration=iteration)
            self.version += 1
            self.lessons_version = max(r.newest_version for r in reports)
            self._load()
        metrics = training_metrics(reports, settle_s=time.perf_counter() - began) if self.trains else {}
        metrics |= acceptance_metrics(reports)
        self.trigger.observe(trigger_rates(reports))
        self._try_again(metrics.get("draft/sim_accept_length", 0.0))
        length = metrics.get("draft/accept_length_trained", 0.0)
        return metrics | {"draft/version": self.version, "draft/alarm": self.trigger.alarms(length)}

    def _share(self) -> None:
        """The target's tables are the engine's own, new or old; only a head that TP cuts has to be copied."""
        embedding, head = self.engine.tables()
        if self.engine.cuts_head:
            self.drafter.share(embedding, head)
        for ours, theirs in ((self.drafter.embedding, embedding), (self.drafter.head, head)):
            assert ours.data_ptr() == theirs.data_ptr(), "the drafter has tables of its own"
        if self._fresh:
            rows = self.drafter.target_tokens(torch.arange(self.drafter.config.head_size))
            self.drafter.lm_head.weight.data.copy_(head[rows])
            self._fresh, self._start = False, (snapshot(self.trainer), self.trainer.iteration)

    def _load(self) -> None:
        """This rank's replica, alike on all ranks, into its engine."""
        self._start = snapshot(self.trainer), self.trainer.iteration
        self.engine.update_weights("draft", draft_tensors(self.drafter), version=self.version)
        self.loaded = True

    def _try_again(self, accept: float) -> None:
        """Promotion and demotion are the bandit's; it hears when there is something new to measure."""
        changed = abs(accept - self.tried_at) > _TRY_AGAIN * max(self.tried_at, 1.0)
        if not accept or not changed:
            return
        learned = self.engine.tuner_state()
        if learned:
            self.engine.load_tuner_state(forget_arms(learned, TRAINED))
            self.tried_at = accept

    def state_dict(self) -> dict[str, Any]:
        digests: list = [None] * dist.get_world_size()
        dist.all_gather_object(digests, self.buffer.digest())
        return {
            "version": self.version, "lessons_version": self.lessons_version, "tried_at": self.tried_at,
            "iteration": self.trainer.iteration, "trigger": self.trigger.state_dict(),
            "buffers": digests, "layout": self.config.layout,
        }  # fmt: skip

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return files_to_save(self.trainer, self.buffer, rank=self._rank)

    def load(self, saved: Mapping[str, Any], folder: Path) -> None:
        """Go on from a checkpoint. Raises ValueError where it holds no drafter of this kind, or others'
        lessons."""
        load_trainer(self.trainer, folder, iteration=saved["iteration"])
        world_size = dist.get_world_size()
        load_lessons(
            self.buffer, folder, digests=saved["buffers"], rank=self._rank, world_size=world_size
        )
        self.trigger.load_state_dict(saved["trigger"])
        self.version, self.lessons_version = saved["version"], saved["lessons_version"]
        self.tried_at, self._fresh = saved["tried_at"], False
