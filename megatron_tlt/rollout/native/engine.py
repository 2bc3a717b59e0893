"""The embedded engine: admits prompts, decodes all running requests, speculates as its policy says."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_tlt.rollout.engine import Weights
from megatron_tlt.rollout.native.cache import SlotCache
from megatron_tlt.rollout.native.drafters import Drafter, NgramDrafter, SubnetDrafter
from megatron_tlt.rollout.native.model import NativeModel, TensorParallel
from megatron_tlt.rollout.native.record import Recorder
from megatron_tlt.rollout.native.request import Group, Request, Running, sampling_tensors
from megatron_tlt.rollout.native.runner import Runner
from megatron_tlt.rollout.native.shape import shape_from_hf
from megatron_tlt.rollout.native.verify import StepOutput, draw, step
from megatron_tlt.rollout.native.weights import WeightLoader
from megatron_tlt.rollout.ngram import NgramIndex
from megatron_tlt.rollout.tuner import FixedPolicy, StrategyPolicy
from megatron_tlt.types import OFF, EngineStats, FeatureSample, Prompt, Rollout, SamplingParams
from megatron_tlt.types import Strategy


@dataclass(kw_only=True, slots=True)
class NativeEngineConfig:
    """Sizes of the embedded engine."""

    max_model_len: int = 1024
    """Longest prompt plus response, in tokens."""
    max_batch: int = 32
    """Most requests that decode at the same time."""
    kv_cache_bytes: int | None = None
    """Bound on the KV cache of this rank; lowers max_batch where needed. None: max_batch decides."""
    max_draft_tokens: int = 16
    """Most draft tokens of one verification (root excluded)."""
    prefill_chunk: int = 2048
    """Most prompt tokens of one forward."""
    subnet_layers: tuple[int, ...] = ()
    """Layers of the target that draft under the strategy "subnet"; empty: the first half."""
    dtype: torch.dtype = torch.float32
    """Type of weights and cache."""


class NativeEngine:
    """`RolloutEngine` in plain torch. Example: NativeEngine(hf_config, NativeEngineConfig()).

    Every token is drawn with a random number that depends on (seed, step, prompt, sample, position) alone,
    and drafts are kept only where they are that very token. So the response does not depend on batch
    composition, admission order, memory bound or speculation, up to rounding of the forward pass.
    `decode` turns token ids to text and is needed for stop strings only.
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
    ) -> None:
        shape = shape_from_hf(hf_config)
        if config.max_model_len > shape.max_position_embeddings:
            raise ValueError(
                f"max_model_len={config.max_model_len} exceeds the model's "
                f"max_position_embeddings={shape.max_position_embeddings}: lower it"
            )
        self.config, self.policy, self.text = config, policy or FixedPolicy(), decode
        self.model = NativeModel(
            shape, dtype=config.dtype, device=torch.device(device), tp=tp
        )
        stride = config.max_model_len + config.max_draft_tokens
        self.cache = SlotCache(
            self.model,
            max_batch=config.max_batch,
            stride=stride,
            max_bytes=config.kv_cache_bytes,
        )
        self.runner = Runner(self.model, self.cache, chunk=config.prefill_chunk)
        self.drafters: dict[str, Drafter] = {"ngram": NgramDrafter(device=self.model.device)}
        if shape.num_layers > 1:
            layers = config.subnet_layers or range(shape.num_layers // 2)
            self.drafters["subnet"] = SubnetDrafter(self.runner, layers=layers)
        self.version, self.paused, self.loaded = 0, False, False
        self.waiting: deque[Group] = deque()
        self.running: list[Request] = []
        self.recorder = Recorder()
        self._indexes: dict[int, NgramIndex] = {}
        self._sampling = None

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0) -> None:
        if not self.loaded:
            raise ValueError("the engine has no weights: call update_weights('target', ...) first")
        if params.stop and self.text is None:
            raise ValueError(f"stop={params.stop} needs text: pass `decode` to the engine")
        for prompt in prompts:
            self._check(prompt, params)
        for prompt in prompts:
            index = self._indexes.setdefault(prompt.prompt_id, NgramIndex())
            self.waiting.append(Group(prompt, params, step, index))

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        need, vocab = len(prompt.tokens) + params.max_tokens, self.model.shape.vocab_size
        if need > self.config.max_model_len:
            raise ValueError(
                f"prompt {prompt.prompt_id}: {len(prompt.tokens)} prompt tokens + max_tokens="
                f"{params.max_tokens} exceed max_model_len={self.config.max_model_len}: lower "
                "max_tokens or raise max_model_len"
            )
        if not 0 <= min(prompt.tokens) <= max(prompt.tokens) < vocab:
            raise ValueError(
                f"prompt {prompt.prompt_id} has tokens {min(prompt.tokens)} to {max(prompt.tokens)}, "
                f"outside the vocabulary of {vocab}"
            )

    def stream(self) -> Iterator[Rollout]:
        while (self.waiting or self.running) and not self.paused:
            yield from self._step()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0
    ) -> list[Rollout]:
        if self.paused or self.waiting or self.running:
            raise ValueError(
                f"generate needs an idle engine: paused={self.paused}, {len(self.running)} running, "
                f"{len(self.waiting)} waiting; use submit and stream, or resume or abort first"
            )
        ids = [p.prompt_id for p in prompts]
        if len(set(ids)) != len(ids):
            raise ValueError("two prompts share a prompt_id: use SamplingParams.n for more samples")
        self.submit(prompts, params, step=step)
        place = {prompt_id: i for i, prompt_id in enumerate(ids)}
        return sorted(self.stream(), key=lambda r: (place[r.prompt_id], r.sample_index))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def abort(self, prompt_ids: Iterable[int] | None = None) -> list[Rollout]:
        chosen = None if prompt_ids is None else set(prompt_ids)

        def hit(group: Group) -> bool:
            return chosen is None or group.prompt.prompt_id in chosen

        self.waiting = deque(group for group in self.waiting if not hit(group))
        ended = [slot for slot, request in enumerate(self.running) if hit(request.group)]
        rollouts = self._release(ended)
        self.recorder.aborted += len(rollouts)
        return rollouts

    def update_weights(
        self, which: Weights, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        if which != "target":
            raise ValueError(f"which={which!r}: this engine's drafters have no weights of their own")
        loader = WeightLoader(self.model)
        with torch.inference_mode():
            loader.load(tensors)
        if not self.loaded:
            loader.check_complete()
        self.loaded, self.version = True, version
        for group in self.waiting:  # a prompt's logits belong to the weights that computed them
            group.logits = group.hidden = None

    def forget_ngrams(self) -> None:
        """Drop what earlier responses taught the n-gram drafter (running ones keep theirs)."""
        self._indexes.clear()

    def capture_features(self, max_rows: int) -> None:
        self.recorder.max_rows = max_rows

    def take_features(self) -> list[FeatureSample]:
        return self.recorder.take_features()

    def stats(self) -> EngineStats:
        return self.recorder.stats()

    @torch.inference_mode()
    def _step(self) -> list[Rollout]:
        start = time.perf_counter()
        prefilled, emitted = self._admit()
        self.recorder.prefilled(prefilled, emitted, time.perf_counter() - start)
        finished = self._release([i for i, r in enumerate(self.running) if r.finish])
        if not self.running or (finished and self.waiting):
            return finished
        start = time.perf_counter()
        strategy = self._strategy()
        running = self._gather()
        drafts = self._draft(running, strategy)
        drafted = time.perf_counter()
        output = step(self.runner, running, drafts)
        lengths = output.lengths.tolist()
        verified = time.perf_counter()
        emitted = self._emit(running, output, lengths, drafts)
        end = time.perf_counter()
        self.policy.record(
            strategy, batch=len(lengths), tokens=emitted, seconds=end - start
        )
        self.recorder.decoded(
            strategy,
            lengths=lengths,
            drafted=0 if drafts is None else int((drafts >= 0).sum()),
            tokens=emitted,
            seconds=(verified - drafted, drafted - start, end - verified),
        )
        return finished + self._release([i for i, r in enumerate(self.running) if r.finish])

    def _strategy(self) -> Strategy:
        """The policy's choice; with tensor parallelism that of the first rank."""
        chosen = self.policy.select(len(self.running))
        if self.model.tp.size > 1:
            names = ["off", *self.drafters]
            code = (names.index(chosen.drafter), chosen.num_steps, chosen.num_draft_tokens)
            name, steps, tokens = self.model.tp.agree(code)
            chosen = Strategy(drafter=names[name], num_steps=steps, num_draft_tokens=tokens)
        return chosen

    def _gather(self) -> Running:
        device = self.model.device
        if self._sampling is None:
            params = [r.group.params for r in self.running]
            self._sampling = sampling_tensors(params, device=device)
        return Running.of(self.running, sampling=self._sampling, device=device)

    def _draft(self, running: Running, strategy: Strategy) -> torch.Tensor | None:
        """Guesses `[b, k]`, cut to the longest row; None where there are none."""
        if strategy == OFF:
            return None
        if strategy.drafter not in self.drafters or strategy.topk != 1:
            raise ValueError(
                f"strategy {strategy}: this engine drafts chains (topk=1) by {sorted(self.drafters)}"
            )
        count = min(strategy.num_steps, strategy.num_draft_tokens - 1)
        if count > self.config.max_draft_tokens:
            raise ValueError(
                f"strategy {strategy} drafts {count} tokens, max_draft_tokens is "
                f"{self.config.max_draft_tokens}: raise it"
            )
        left = max(r.group.params.max_tokens - r.count for r in running.requests) - 1
        if min(count, left) < 1:
            return None
        drafts = self.drafters[strategy.drafter].propose(running, count=min(count, left))
        width = int((drafts >= 0).sum(1).max())
        return drafts[:, :width] if width else None

    def _emit(
        self, running: Running, output: StepOutput, lengths: list[int], drafts: torch.Tensor | None
    ) -> int:
        tokens, log_probs = output.tokens.tolist(), output.log_probs.tolist()
        guessed = [0] * len(lengths) if drafts is None else (drafts >= 0).sum(1).tolist()
        total = 0
        for row, request in enumerate(running.requests):
            n = lengths[row]
            taken = request.emit(
                tokens[row][:n], log_probs[row][:n], version=self.version, decode=self.text
            )
            if drafts is not None:
                request.verify_ct += 1
                request.num_drafted += guessed[row]
                request.num_accepted += taken - 1
            self.recorder.capture(request, output.hidden[row, :taken], self.model.norm)
            total += taken
        return total

    def _admit(self) -> tuple[int, int]:
        """Start waiting samples while slots are free: (prompt tokens prefilled, tokens emitted)."""
        groups: list[tuple[Group, int]] = []  # with the slot that holds the prompt
        fresh: list[Request] = []
        while self.waiting and len(self.running) + len(fresh) < self.cache.slots:
            group = self.waiting[0]
            source = self._sibling(group)
            if source is None:
                groups.append((group, len(self.running) + len(fresh)))
            while group.next_sample < group.params.n:
                if len(self.running) + len(fresh) >= self.cache.slots:
                    break
                vocab = self.model.shape.vocab_size
                fresh.append(Request.of(group, vocab=vocab, device=self.model.device))
            if group.next_sample == group.params.n:
                self.waiting.popleft()
        if groups:
            self._prefill(groups)
        if fresh:
            self._start(fresh, {id(group): slot for group, slot in groups})
        return sum(len(group.prompt.tokens) for group, _ in groups), len(fresh)

    def _sibling(self, group: Group) -> int | None:
        """A slot whose first rows are this prompt, if its logits are still known."""
        if group.logits is None:
            return None
        return next((i for i, r in enumerate(self.running) if r.group is group), None)

    def _prefill(self, groups: list[tuple[Group, int]]) -> None:
        hidden = self.runner.prefill([(group.prompt.tokens, slot) for group, slot in groups])
        logits = self.model.logits(hidden)
        for row, (group, _) in enumerate(groups):
            group.logits, group.hidden = logits[row], hidden[row : row + 1]
            if not group.indexed:
                group.index.extend(group.prompt.tokens, start=0)
                group.indexed = True

    def _start(self, fresh: list[Request], sources: dict[int, int]) -> None:
        """Copy the prompt to each sample's slot and draw its first token."""
        for request in fresh:
            slot = len(self.running)
            source = sources.get(id(request.group))
            if source is None:
                source = self._sibling(request.group)
            if source != slot:
                self.cache.copy(source, slot, length=len(request.group.prompt.tokens))
            self.running.append(request)
        self._sampling = None
        sampling = sampling_tensors([r.group.params for r in fresh], device=self.model.device)
        seeds = torch.tensor([r.seed for r in fresh], device=self.model.device)
        seen = None
        if sampling.repetition_penalty is not None:
            logits = fresh[0].group.logits
            blank = torch.zeros_like(logits, dtype=torch.bool)
            seen = torch.stack([blank if r.seen is None else r.seen for r in fresh])
        logits = torch.stack([r.group.logits for r in fresh])
        tokens, log_probs = draw(
            logits, sampling, seeds=seeds, counters=torch.zeros_like(seeds), seen=seen
        )
        for request, token, log_prob in zip(
            fresh, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            request.emit([token], [log_prob], version=self.version, decode=self.text)
            self.recorder.capture(request, request.group.hidden, self.model.norm)

    def _release(self, slots: list[int]) -> list[Rollout]:
        """Take requests out; the last ones move into the gaps."""
        rollouts = [self.running[slot].rollout() for slot in slots]
        for slot in slots:
            self.recorder.finished(self.running[slot])
        for slot in reversed(slots):
            last = self.running.pop()
            if slot < len(self.running):
                self.running[slot] = last
                self.cache.copy(len(self.running), slot, length=len(last.tokens) - 1)
        if slots:
            self._sampling = None
        return rollouts
