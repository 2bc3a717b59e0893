"""The embedded engine: admits prompts, decodes all running requests, speculates as its policy says."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.rollout.acceptance import Counts
from megatron_tlt.rollout.engine import Weights, check_prompt, generate_in_order
from megatron_tlt.rollout.native.cache import PlaneShape, SlotCache
from megatron_tlt.rollout.native.config import NativeEngineConfig
from megatron_tlt.rollout.native.draft import Draft
from megatron_tlt.rollout.native.eagle import DRAFT, EagleModel
from megatron_tlt.rollout.native.model import NativeModel, TensorParallel
from megatron_tlt.rollout.native.record import Recorder
from megatron_tlt.rollout.native.request import Group, Request, Running, sampling_tensors
from megatron_tlt.rollout.native.runner import FEATURES, TARGET, Runner
from megatron_tlt.rollout.native.scheduler import Scheduler
from megatron_tlt.rollout.native.shape import shape_from_hf
from megatron_tlt.rollout.native.speculation import Speculation
from megatron_tlt.rollout.native.verify import StepOutput, draw, step
from megatron_tlt.rollout.native.weights import DraftLoader, WeightLoader
from megatron_tlt.rollout.ngram import NgramStore
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, StepContext, StrategyPolicy
from megatron_tlt.types import EngineStats, FeatureSample, Prompt, Rollout, SamplingParams


class NativeEngine:
    """`RolloutEngine` in plain torch. Example: NativeEngine(hf_config, NativeEngineConfig()).

    Every token is drawn with a random number that depends on (seed, step, prompt, sample, position) alone,
    and drafts are kept only where they are that very token. So the response does not depend on batch
    composition, admission order, memory bound or speculation, up to rounding of the forward pass.
    `decode` turns token ids to text and is needed for stop strings only. `drafter` makes room for an EAGLE
    drafter, whose weights come by `update_weights("draft", ...)`, and decides which layers are features.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        config: NativeEngineConfig,
        *,
        tp: TensorParallel | None = None,
        device: torch.device | str = "cpu",
        policy: StrategyPolicy | None = None,
        decode: Callable[[list[int]], str] | None = None,
        drafter: DrafterConfig | None = None,
    ) -> None:
        shape = shape_from_hf(hf_config)
        if config.max_model_len > shape.max_position_embeddings:
            raise ValueError(
                f"max_model_len={config.max_model_len} exceeds the model's "
                f"max_position_embeddings={shape.max_position_embeddings}: lower it"
            )
        self.config, self.policy, self.text = config, policy or FixedPolicy(), decode
        self.model = NativeModel(shape, dtype=config.dtype, device=torch.device(device), tp=tp)
        self.eagle = None if drafter is None else EagleModel(drafter, self.model)
        layers = () if drafter is None else drafter.feature_layers
        self.inner_features = len(layers) * shape.hidden_size
        room = config.max_draft_tokens
        self.cache = SlotCache(
            self._planes(), max_batch=config.max_batch, longest=config.max_model_len + room,
            device=self.model.device, max_bytes=config.kv_cache_bytes,
        )  # fmt: skip
        self.runner = Runner(
            self.model, self.cache, chunk=config.prefill_chunk, feature_layers=layers
        )
        self.speculation = Speculation(self.runner, config, self.eagle)
        self.scheduler = Scheduler(self.cache, room=room, start=self._new_request)
        self.recorder, self.ngrams = Recorder(), NgramStore(max_entries=config.max_ngrams)
        self.version, self.draft_version = 0, 0
        self.paused, self.loaded = False, False
        self._running: Running | None = None

    def _planes(self) -> dict[str, PlaneShape]:
        model, dtype = self.model, self.model.dtype
        planes = {
            TARGET: PlaneShape(layers=model.shape.num_layers, width=model.kv_width, dtype=dtype)
        }
        if self.eagle is not None:
            planes[DRAFT] = PlaneShape(layers=1, width=self.eagle.kv_width, dtype=dtype)
            planes[FEATURES] = self._feature_plane()
        return planes

    def _feature_plane(self) -> PlaneShape:
        width = self.inner_features + self.model.shape.hidden_size
        return PlaneShape(layers=1, width=width, dtype=self.model.dtype)

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0) -> None:
        if not self.loaded:
            raise ValueError("the engine has no weights: call update_weights('target', ...) first")
        if not self.cache.held:
            raise ValueError("the engine's memory is released: call resume_memory_occupation() first")
        if params.stop and self.text is None:
            raise ValueError(f"stop={params.stop} needs text: pass `decode` to the engine")
        for prompt in prompts:
            check_prompt(
                prompt, params, max_model_len=self.config.max_model_len,
                vocab_size=self.model.shape.vocab_size,
            )  # fmt: skip
        for prompt in prompts:
            index = self.ngrams.index(prompt.prompt_id)
            self.scheduler.waiting.append(Group(prompt, params, step, index))

    def stream(self) -> Iterator[Rollout]:
        while self.scheduler.busy and not self.paused:
            yield from self._step()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0
    ) -> list[Rollout]:
        if self.paused or self.scheduler.busy:
            raise ValueError(
                f"generate needs an idle engine: paused={self.paused}, "
                f"{len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting; use submit "
                "and stream, or resume or abort first"
            )
        return generate_in_order(self, prompts, params, step=step)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def release_memory_occupation(self) -> None:
        if self.scheduler.busy:
            raise ValueError(
                f"{len(self.scheduler.running)} running and {len(self.scheduler.waiting)} waiting requests "
                "need the key/value cache: finish or abort them before release_memory_occupation()"
            )
        self.cache.release()

    def resume_memory_occupation(self) -> None:
        if not self.cache.held:
            self.cache.allocate()

    def abort(self, prompt_ids: Iterable[int] | None = None) -> list[Rollout]:
        chosen, queues = None if prompt_ids is None else set(prompt_ids), self.scheduler

        def hit(group: Group) -> bool:
            return chosen is None or group.prompt.prompt_id in chosen

        queues.waiting = deque(group for group in queues.waiting if not hit(group))
        idle = [request for request in queues.preempted if hit(request.group)]
        queues.preempted = deque(r for r in queues.preempted if not hit(r.group))
        rollouts = [request.rollout() for request in idle]
        rollouts += self._release([i for i, r in enumerate(queues.running) if hit(r.group)])
        self.recorder.aborted += len(rollouts)
        return rollouts

    def update_weights(
        self, which: Weights, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int,
        checksum: str | None = None,
    ) -> None:  # fmt: skip
        if which not in ("target", "draft"):
            raise ValueError(f"which={which!r} is neither 'target' nor 'draft'")
        if which == "draft" and self.eagle is None:
            raise ValueError("the engine was made without a drafter: pass drafter=DrafterConfig(...)")
        loader = WeightLoader(self.model) if which == "target" else DraftLoader(self.eagle)
        with torch.inference_mode():
            loader.load(tensors, checksum=checksum)
        if which == "draft":
            self.draft_version = version
            self.speculation.enable_eagle()
            for request in self.scheduler.running:
                request.drafted_to = 0
            return
        self.loaded, self.version = True, version
        self.scheduler.epoch += 1
        for group in self.scheduler.waiting:  # a prompt's logits belong to the weights that made them
            group.logits = None

    def forget_ngrams(self) -> None:
        """Drop what earlier responses taught the n-gram drafter (running ones keep theirs)."""
        self.ngrams.clear()

    def capture_features(self, max_rows: int, *, context_rows: int = 0) -> None:
        self.recorder.max_rows, self.recorder.context_rows = max_rows, context_rows
        if max_rows and not self.runner.keeps_features:
            self.cache.add_plane(FEATURES, self._feature_plane())

    def take_features(self) -> list[FeatureSample]:
        return self.recorder.take_features()

    def take_acceptance(self) -> Counts:
        """What became of the drafts since the last call; see `rollout.acceptance`."""
        return self.recorder.acceptance.take()

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's embedding and head, `[v, h]` each, for a drafter to share.

        Both are the engine's own storage, which weight updates fill anew; only where tensor parallelism cuts
        the head it is a copy, gathered now (collective over the TP group).
        """
        head = self.model.tp.concat(self.model.head.weight)
        return self.model.embedding, head[:, : self.model.shape.vocab_size].t()

    @property
    def cuts_head(self) -> bool:
        """Whether `tables` copies the head."""
        return self.model.tp.size > 1

    def stats(self) -> EngineStats:
        self.recorder.preemptions = self.scheduler.preemptions
        return self.recorder.stats()

    def tuner_state(self) -> dict[str, Any]:
        return self.policy.state_dict() if isinstance(self.policy, BanditTuner) else {}

    def load_tuner_state(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.policy, BanditTuner):
            self.policy.load_state_dict(state)

    @torch.inference_mode()
    def _step(self) -> list[Rollout]:
        """Admit, then decode every running request once; the responses that ended."""
        start = time.perf_counter()
        prefilled, emitted = self._admit()
        self.recorder.prefilled(prefilled, emitted, time.perf_counter() - start)
        finished = self._release_finished()
        if not self.scheduler.running or (finished and self.scheduler.waiting):
            return finished
        start = time.perf_counter()
        if self.scheduler.make_room():
            self._running = None
        chosen = self.policy.select(len(self.scheduler.running), self._context())
        strategy = self.speculation.agree(chosen)
        running = self._gather()
        draft = self.speculation.draft(running, strategy)
        drafted = time.perf_counter()
        output = step(self.runner, running, draft)
        lengths = output.lengths.tolist()
        verified = time.perf_counter()
        tokens, guesses = self._emit(running, output, lengths, draft, drafter=strategy.drafter)
        ended = self._release_finished()
        if not ended:
            running.advance(output.lengths, output.last())
        end = time.perf_counter()
        self.policy.record(strategy, batch=len(lengths), tokens=tokens, seconds=end - start)
        seconds = (verified - drafted, drafted - start, end - verified)
        self.recorder.decoded(strategy, lengths=lengths, drafted=guesses, tokens=tokens, seconds=seconds)
        return finished + ended

    def _context(self) -> StepContext:
        requests = self.scheduler.running
        left = sum(r.group.params.max_tokens - r.count for r in requests)
        return StepContext(
            accept_rate=sum(r.accept_rate for r in requests) / len(requests),
            remaining=left / len(requests),
            draft_version=self.draft_version,
        )

    def _gather(self) -> Running:
        if self._running is None:
            self._running = Running.of(self.scheduler.running, device=self.model.device)
        return self._running

    def _emit(
        self, running: Running, output: StepOutput, lengths: list[int], draft: Draft | None, *,
        drafter: str,
    ) -> tuple[int, int]:  # fmt: skip
        """Hand the tokens to their requests: (tokens taken, tokens drafted)."""
        tokens, log_probs = output.tokens.tolist(), output.log_probs.tolist()
        drafted = levels = [0] * len(lengths)
        if draft is not None:
            drafted, levels = draft.drafted().tolist(), draft.levels_of().tolist()
        total = 0
        for row, request in enumerate(running.requests):
            n = lengths[row]
            taken = request.emit(
                tokens[row][:n], log_probs[row][:n], version=self.version, decode=self.text
            )
            if draft is not None:
                request.num_drafted += drafted[row]
                request.verified(levels=levels[row], accepted=taken - 1)
                if levels[row]:
                    self.recorder.acceptance.observe(
                        drafter, length=request.count, levels=levels[row], accepted=taken - 1
                    )
            total += taken
        return total, sum(drafted)

    def _new_request(self, group: Group) -> Request:
        return Request.of(group, vocab=self.model.shape.vocab_size, device=self.model.device)

    def _admit(self) -> tuple[int, int]:
        """Start waiting samples while there is room: (prompt tokens computed, tokens emitted)."""
        admission, running = self.scheduler.admit(), self.scheduler.running
        if not admission.requests:
            return 0, 0
        self._running = None
        computed = self._prefill(admission.prefill) if admission.prefill else 0
        for request, source, slot in admission.copies:
            length = len(request.group.prompt.tokens)
            self.cache.copy(source, slot, length=length)
            request.featured = running[source].featured
            request.drafted_to = min(running[source].drafted_to, length - 1)
        fresh = [request for request in admission.requests if request.count == 0]
        if fresh:
            self._start(fresh)
        return computed, len(fresh)

    def _prefill(self, pairs: list[tuple[Request, int]]) -> int:
        """Compute prompts, and preempted requests' whole sequences: tokens computed."""
        sequences = [(r.tokens[:-1] if r.count else r.tokens, slot) for r, slot in pairs]
        final = self.runner.prefill(sequences)
        first = [row for row, (request, _) in enumerate(pairs) if request.count == 0]
        logits = self.model.logits(final[torch.tensor(first, device=final.device)]) if first else ()
        for row, line in zip(first, logits, strict=True):
            pairs[row][0].group.logits = line
        for request, _ in pairs:
            same = not request.versions or request.versions[-1] == self.version
            request.featured = same and self.runner.keeps_features
        return sum(len(tokens) for tokens, _ in sequences)

    def _start(self, fresh: list[Request]) -> None:
        """Draw the first token of each sample from its prompt's logits."""
        sampling = sampling_tensors([r.group.params for r in fresh], device=self.model.device)
        seeds = torch.tensor([r.seed for r in fresh], device=self.model.device)
        logits = torch.stack([r.group.logits for r in fresh])
        seen = None
        if sampling.repetition_penalty is not None:
            blank = torch.zeros_like(logits[0], dtype=torch.bool)
            seen = torch.stack([blank if r.seen is None else r.seen for r in fresh])
        tokens, log_probs = draw(logits, sampling, seeds=seeds, counters=torch.zeros_like(seeds), seen=seen)
        for request, token, log_prob in zip(fresh, tokens.tolist(), log_probs.tolist(), strict=True):
            request.emit([token], [log_prob], version=self.version, decode=self.text)

    def _release_finished(self) -> list[Rollout]:
        return self._release([i for i, r in enumerate(self.scheduler.running) if r.finish])

    def _release(self, slots: list[int]) -> list[Rollout]:
        """Take requests out, keeping what they taught."""
        if not slots:
            return []
        for slot in slots:
            request, first = self.scheduler.running[slot], slot * self.cache.stride
            request.learn_ngrams()
            if self.recorder.max_rows and self.runner.keeps_features:
                rows = self.cache.planes[FEATURES][0, first : first + len(request.tokens)]
                self.recorder.finished(request, rows, inner=self.inner_features)
        self.ngrams.trim()
        self._running = None
        return [request.rollout() for request in self.scheduler.remove(slots)]
