"""`RolloutEngine` on SGLang: requests, weights with versions, features, and a new engine for a lost one.

What differs from the embedded engine: SGLang runs on between calls; a weight update retracts the requests
under way, which then go on with their tokens under the new weights; sampled tokens depend on the engine's own
random numbers, so on batch composition. Log-probabilities mean the same.
"""

import json
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_tlt.files import write_json
from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.rollout.acceptance import Counts
from megatron_tlt.rollout.engine import Weights, check_prompt, generate_in_order
from megatron_tlt.rollout.native.shape import shape_from_hf
from megatron_tlt.rollout.sglang.answers import (
    NOTHING,
    check_drafter,
    check_sampling,
    check_speculation,
    feature_sample,
    rollout_of,
    sampling_fields,
)
from megatron_tlt.rollout.sglang.config import (
    BANDIT_FILE,
    ORDER_FILE,
    STEPS_FILE,
    SglangConfig,
    engine_arguments,
    engine_environment,
)
from megatron_tlt.rollout.sglang.process import EngineDied, EngineProcess, check_installed
from megatron_tlt.rollout.sglang.store import WeightStore
from megatron_tlt.rollout.sglang.transport import build_transport
from megatron_tlt.rollout.tuner import FixedPolicy, StrategyPolicy
from megatron_tlt.types import EngineStats, FeatureSample, Prompt, Rollout, SamplingParams


@dataclass(slots=True)
class _Open:
    """A request without an answer."""

    prompt: Prompt
    sample: int
    params: SamplingParams
    rid: str = ""
    hidden: Path | None = None
    aborted: bool = False


class SglangEngine:
    """One `sglang.Engine` in a process of its own. Example: SglangEngine(hf_config, SglangConfig()).

    It starts with the first target weights (and, where it drafts by EAGLE, the first drafter). They are kept:
    a new engine starts from them when one is lost, and the requests without an answer are put to it again.
    `drafter` is needed for EAGLE; `close` ends the process.
    """

    def __init__(
        self, hf_config: Mapping[str, Any], config: SglangConfig, *, device: str = "cpu",
        drafter: DrafterConfig | None = None,
    ) -> None:  # fmt: skip
        check_installed(device)
        shape = shape_from_hf(hf_config)
        if config.max_model_len + config.room > shape.max_position_embeddings:
            raise ValueError(
                f"max_model_len={config.max_model_len} and {config.room} tokens for drafts exceed the "
                f"model's max_position_embeddings={shape.max_position_embeddings}: lower it"
            )
        if not hf_config.get("architectures"):
            raise ValueError("the target's config names no architectures: SGLang chooses its model by them")
        check_drafter(config.strategy, drafter)
        self._eagle3 = drafter is not None and drafter.layout == "eagle3"
        self.config, self.shape, self.device, self.drafter = config, shape, device, drafter
        self._room = tempfile.TemporaryDirectory(prefix="megatron_tlt_sglang_")
        self.store = WeightStore(
            Path(self._room.name), hf_config, shape, drafter, bucket_bytes=config.bucket_bytes,
            in_memory=config.weight_transport != "folder",
        )  # fmt: skip
        self._transport = build_transport(config, device=device)
        self.process: EngineProcess | None = None
        self.paused, self.restarts = False, 0
        self._requests: dict[int, _Open] = {}
        self._early: deque[Rollout] = deque()
        self._made = self._max_rows = self._context_rows = self._rows = 0
        self._holds_memory = True
        self._features: list[FeatureSample] = []
        self._tokens = self._speculated = self._verify_ct = self._drafted = 0
        self._preemptions = self._aborted = 0
        self._seen = (0, 0)
        self.policy: StrategyPolicy = FixedPolicy(strategy=config.strategy)
        """What this side knows of the strategy; where adaptive_steps are set, the bandit is inside SGLang."""
        self.cuts_head = False

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0) -> None:
        if self.process is None:
            raise ValueError(
                f"the engine has no weights: call update_weights for {self.store.kinds}; it has "
                f"{self.store.present}"
            )
        check_sampling(params)
        check_speculation(params, self.config.strategy, device=self.device)
        for prompt in prompts:
            check_prompt(
                prompt, params, max_model_len=self.config.max_model_len,
                vocab_size=self.shape.vocab_size,
            )  # fmt: skip
        for prompt in prompts:
            for sample in range(params.n):
                self._put(_Open(prompt, sample, params))

    def _put(self, request: _Open) -> None:
        self._made += 1
        request.rid = f"request-{self._made}"
        states = Path(self._room.name) / f"{request.rid}.safetensors"
        request.hidden = states if self._max_rows else None
        fields = dict(
            rid=request.rid, input_ids=list(request.prompt.tokens),
            sampling_params=sampling_fields(request.params),
            hidden=None if request.hidden is None else str(states),
        )  # fmt: skip
        try:
            number = self.process.post("generate", **fields)
        except EngineDied as death:
            self._restart(death)
            number = self.process.post("generate", **fields)
        self._requests[number] = request

    def stream(self) -> Iterator[Rollout]:
        while (self._early or self._requests) and not self.paused:
            rollout = self._early.popleft() if self._early else self._next()
            if rollout is not None:
                yield rollout

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, step: int = 0
    ) -> list[Rollout]:
        if self.paused or self._requests or self._early:
            raise ValueError(
                f"generate needs an idle engine: paused={self.paused}, {len(self._requests)} under way; use "
                "submit and stream, or resume or abort first"
            )
        return generate_in_order(self, prompts, params, step=step)

    def _next(self) -> Rollout | None:
        """The next finished response; None where a new engine had to be started, and takes over."""
        try:
            answer = self.process.next_output()
        except EngineDied as death:
            self._restart(death)
            return None
        request = self._requests.pop(answer["id"])
        if "error" in answer and not request.aborted:
            raise RuntimeError(f"prompt {request.prompt.prompt_id}: SGLang says {answer['error']}")
        return self._finish(request, answer.get("value", NOTHING))

    def _finish(self, request: _Open, value: dict[str, Any]) -> Rollout:
        rollout = rollout_of(
            request.prompt, request.sample, value, max_tokens=request.params.max_tokens
        )
        self._tokens += len(rollout.tokens)
        self._speculated += rollout.num_accepted + rollout.verify_ct
        self._verify_ct += rollout.verify_ct
        self._seen = (self._seen[0] + rollout.verify_ct, self._seen[1] + rollout.num_accepted)
        self._drafted += rollout.num_drafted
        self._preemptions += value["retractions"]
        if request.hidden is not None and request.hidden.exists():
            states = load_file(request.hidden)
            request.hidden.unlink()
            sample = None
            if not value["retractions"]:  # a retracted request's rows come in another order
                size = self.shape.hidden_size if self.drafter is None else self.drafter.feature_size
                sample = feature_sample(
                    rollout, states, context_rows=self._context_rows, feature_size=size
                )
            if sample is not None and self._rows + len(sample.hidden) <= self._max_rows:
                self._rows += len(sample.hidden)
                self._features.append(sample)
        return rollout

    def pause(self) -> None:
        before, self.paused = self.paused, True
        if not before and self.process is not None:
            self._tell("pause")

    def resume(self) -> None:
        before, self.paused = self.paused, False
        if before and self.process is not None:
            self._tell("resume")

    def abort(self, prompt_ids: Iterable[int] | None = None) -> list[Rollout]:
        chosen = None if prompt_ids is None else set(prompt_ids)
        was_paused = self.paused
        self.resume()  # a paused engine ends nothing
        hit = [r for r in self._requests.values() if chosen is None or r.prompt.prompt_id in chosen]
        ids, ended = {r.prompt.prompt_id for r in hit}, []
        for request in hit:
            request.aborted = True
        if hit:
            self._tell("abort", rids=[request.rid for request in hit])
        while any(request.aborted for request in self._requests.values()):
            rollout = self._next()
            if rollout is not None:
                (ended if rollout.prompt_id in ids else self._early).append(rollout)
        if was_paused:
            self.pause()
        started = [rollout for rollout in ended if rollout.tokens]
        self._aborted += len(started)
        return started

    def update_weights(
        self, which: Weights, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int,
        checksum: str | None = None,
    ) -> None:  # fmt: skip
        """As the Protocol says; the requests under way compute their keys and values again."""
        source = self.store.put(which, tensors, version=version, checksum=checksum)
        if self.process is None:
            if set(self.store.present) == set(self.store.kinds):
                self._launch()
            return
        named = str(version) if which == "target" else None
        try:
            self._transport.send(self.process, which, source, version=named, paused=self.paused)
        except EngineDied as death:
            self._restart(death)

    def _tell(self, op: str, **fields: Any) -> None:
        """Have the engine do something that a new one, started with the present state, need not do."""
        try:
            self.process.call(op, **fields)
        except EngineDied as death:
            self._restart(death)

    @property
    def version(self) -> int:
        """Of the newest target."""
        return self.store.versions["target"]

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's embedding and head `[v, h]` on the host, for a drafter to share; updates fill them."""
        return self.store.tables.pair()

    def take_acceptance(self) -> Counts:
        """Drafts since the last call; SGLang counts by request, not by position."""
        seen, self._seen = self._seen, (0, 0)
        return {"eagle/all/0": seen} if seen[0] else {}

    def engine_checksum(self) -> str:
        """`weights_checksum` of what the engine itself holds of the target (for small models)."""
        kind = str(self.config.dtype).removeprefix("torch.")
        return self.process.call("checksum", shapes=self.store.shapes("target"), dtype=kind)

    def tuner_state(self) -> dict[str, Any]:
        """As the Protocol says, of the bandit inside SGLang and at most 20 steps old; {} before that."""
        for name in (ORDER_FILE, BANDIT_FILE):
            try:
                return json.loads((Path(self._room.name) / name).read_text(encoding="utf-8"))
            except FileNotFoundError:  # not there yet, or the plugin has just taken the order
                continue
        return {}

    def load_tuner_state(self, state: Mapping[str, Any]) -> None:
        if self.config.adaptive_steps:
            write_json(Path(self._room.name) / ORDER_FILE, dict(state))

    def check_health(self) -> dict[str, Any]:
        """Version and processes, from the engine itself. Raises EngineDied."""
        return self.process.call("info")

    def _launch(self) -> None:
        folders = {kind: self.store.folder(kind) for kind in self.store.kinds}
        arguments = engine_arguments(
            self.config, device=self.device, target=folders["target"], draft=folders.get("draft"),
            eagle3=self._eagle3,
        )  # fmt: skip
        arguments |= {"weight_version": str(self.store.versions["target"])}
        if self.config.adaptive_steps:
            steps = {"candidate_steps": sorted(self.config.adaptive_steps)}
            write_json(Path(self._room.name) / STEPS_FILE, {"1": steps})
        self.process = EngineProcess(
            arguments, environment=engine_environment(
                self.config, device=self.device, eagle3=self._eagle3
            ),
            timeout_s=self.config.timeout_s,
        )  # fmt: skip
        self._holds_memory = True
        self._transport.connect(self.process)
        if self.paused:
            self.process.call("pause")

    def _restart(self, death: EngineDied) -> None:
        """A new engine with the newest weights; open requests start from their prompts again."""
        self.process.close()
        if self.restarts >= self.config.max_restarts:
            raise EngineDied(f"{death}; max_restarts={self.config.max_restarts} are used up") from death
        self.restarts += 1
        limit = self.config.max_restarts
        print(f" SGLang engine lost ({death}): start {self.restarts} of {limit}", flush=True)
        self._launch()
        waiting = [request for request in self._requests.values() if not request.aborted]
        self._requests = {}
        for request in waiting:
            self._put(request)

    def capture_features(self, max_rows: int, *, context_rows: int = 0) -> None:
        self._max_rows, self._context_rows = max_rows, context_rows

    def take_features(self) -> list[FeatureSample]:
        taken, self._features, self._rows = self._features, [], 0
        return taken

    def stats(self) -> EngineStats:
        """Counters of finished responses; SGLang tells no single steps."""
        return EngineStats(
            tokens=self._tokens, speculated_tokens=self._speculated, verify_ct=self._verify_ct,
            drafted=self._drafted, preemptions=self._preemptions, aborted=self._aborted,
        )  # fmt: skip

    def release_memory_occupation(self) -> None:
        """Give the KV cache's memory to the training (`enable_memory_saver` in config.arguments)."""
        if self._requests:
            raise ValueError(
                f"{len(self._requests)} requests under way need the KV cache: finish or abort them before "
                "release_memory_occupation()"
            )
        if self._holds_memory:  # SGLang asserts that it is told each of the two once
            self.process.call("memory", resume=False)
        self._holds_memory = False

    def resume_memory_occupation(self) -> None:
        if not self._holds_memory:
            self.process.call("memory", resume=True)
        self._holds_memory = True

    def close(self) -> None:
        """End the engine's process and delete its folders."""
        self._transport.close()
        if self.process is not None:
            self.process.close()
            self.process = None
        self._room.cleanup()
