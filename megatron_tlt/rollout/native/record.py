"""What the engine remembers of its steps, and the hidden states that it captures."""

from collections import deque

import torch

from megatron_tlt.rollout.acceptance import Acceptance
from megatron_tlt.rollout.native.request import Request
from megatron_tlt.types import EngineStats, FeatureSample, StepRecord, Strategy

_RECENT = 1024


class Recorder:
    """Counters, the newest step records, and captured features within `max_rows`."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.prefill_tokens = 0
        self.speculated_tokens = self.verify_ct = self.drafted = self.aborted = 0
        self.recent: deque[StepRecord] = deque(maxlen=_RECENT)
        self.max_rows = self.context_rows = self.rows = self.preemptions = 0
        self.samples: list[FeatureSample] = []
        self.acceptance = Acceptance()
        self._prefill = (0, 0, 0.0)

    def prefilled(self, prompt_tokens: int, emitted: int, seconds: float) -> None:
        """An admission: its time and prompt tokens are reported with the step that follows."""
        self.prefill_tokens += prompt_tokens
        self.tokens += emitted
        tokens, first, before = self._prefill
        self._prefill = (tokens + prompt_tokens, first + emitted, before + seconds)

    def decoded(
        self,
        strategy: Strategy,
        *,
        lengths: list[int],
        drafted: int,
        tokens: int,
        seconds: tuple[float, float, float],
    ) -> None:
        """One decode step; `seconds` of target, draft and the rest."""
        self.steps += 1
        self.tokens += tokens
        self.drafted += drafted
        speculated = drafted > 0
        if speculated:
            self.speculated_tokens += tokens
            self.verify_ct += len(lengths)
        prompt_tokens, first, before = self._prefill
        self._prefill = (0, 0, 0.0)
        target, draft, other = (1000 * s for s in seconds)
        self.recent.append(
            StepRecord(
                batch=len(lengths),
                strategy=strategy,
                tokens=tokens + first,
                drafted=drafted,
                accepted_by_position=tuple(
                    sum(n > i for n in lengths) for i in range(1, max(lengths))
                ),
                prefill_tokens=prompt_tokens,
                target_ms=target,
                draft_ms=draft,
                other_ms=other + 1000 * before,
                prefill_ms=1000 * before,
            )
        )

    def finished(self, request: Request, rows: torch.Tensor, *, inner: int) -> None:
        """Keep a response's features if its rows fit; a part of a response is no use to a drafter.

        `rows` `[positions, f]`: the request's features, the first `inner` columns those of inner layers (0:
        there are none). Rows of several weight versions are dropped.
        """
        prompt = request.group.prompt
        if not request.featured or len(set(request.versions)) != 1:
            return
        context = min(self.context_rows, len(prompt.tokens) - 1)
        first, last = len(prompt.tokens) - 1 - context, len(request.tokens) - 1
        if self.rows + last - first > self.max_rows:
            return
        with torch.inference_mode(False):  # a trainer may use them in any way
            kept = rows[first:last].clone()
        self.rows += len(kept)
        self.samples.append(
            FeatureSample(
                prompt_id=prompt.prompt_id,
                sample_index=request.sample,
                tokens=tuple(request.tokens[len(prompt.tokens) :]),
                hidden=kept[:, :inner].contiguous() if inner else kept,
                weight_version=request.versions[0],
                context_tokens=prompt.tokens[len(prompt.tokens) - context :] if context else (),
                last_hidden=kept[:, inner:].contiguous() if inner else None,
            )
        )

    def take_features(self) -> list[FeatureSample]:
        taken, self.samples = self.samples, []
        self.rows -= sum(len(sample.hidden) for sample in taken)
        return taken

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self.steps,
            tokens=self.tokens,
            prefill_tokens=self.prefill_tokens,
            speculated_tokens=self.speculated_tokens,
            verify_ct=self.verify_ct,
            drafted=self.drafted,
            preemptions=self.preemptions,
            aborted=self.aborted,
            recent=tuple(self.recent),
        )
