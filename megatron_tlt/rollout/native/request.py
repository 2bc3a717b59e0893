"""One response in the making, and the tensors that a step needs of all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_tlt.ops.sampling import SamplingTensors, stream_seed
from megatron_tlt.rollout.ngram import NgramIndex
from megatron_tlt.types import FinishReason, Prompt, Rollout, SamplingParams

# Acceptance that a request starts with, and the weight of its newest verification.
_FIRST_RATE, _NEWEST = 0.7, 0.2
# A stop string is looked for in the text of this many tokens more than it has characters.
_STOP_MARGIN = 4


@dataclass(slots=True)
class Group:
    """A prompt and the samples of it that have not started."""

    prompt: Prompt
    params: SamplingParams
    step: int
    index: NgramIndex
    """Shared by the siblings."""
    next_sample: int = 0
    logits: torch.Tensor | None = None
    """`[v]`, after the prompt; None until it is prefilled."""


@dataclass(slots=True)
class Request:
    """A running response. `tokens` holds prompt and response; all but the last are in the cache."""

    group: Group
    sample: int
    tokens: list[int]
    seed: int
    arrival: int = 0
    """Order in which requests started: the newest are preempted first."""
    epoch: int = 0
    """Weight updates before its prompt was computed."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    featured: bool = False
    """Whether the cache has the features of all its positions."""
    indexed: int = 0
    """Tokens that the n-gram index has."""
    drafted_to: int = 0
    """Positions in the EAGLE drafter's cache."""
    accept_rate: float = _FIRST_RATE
    """Moving average of the chance that the next draft token is accepted."""
    seen: torch.Tensor | None = None
    """bool `[v]`, for the repetition penalty."""
    verify_ct: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @staticmethod
    def of(group: Group, *, vocab: int, device: torch.device) -> "Request":
        sample, params = group.next_sample, group.params
        group.next_sample += 1
        seed = stream_seed(params.seed, group.step, group.prompt.prompt_id, sample)
        request = Request(group, sample, list(group.prompt.tokens), seed)
        if params.repetition_penalty != 1:
            request.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            request.seen[request.tokens] = True
        return request

    @property
    def count(self) -> int:
        """Response tokens so far."""
        return len(self.log_probs)

    def emit(
        self, tokens: Sequence[int], log_probs: Sequence[float], *, version: int,
        decode: Callable[[list[int]], str] | None,
    ) -> int:  # fmt: skip
        """Append tokens until one of them ends the response; returns how many were taken."""
        params = self.group.params
        start = len(self.tokens)
        for token, log_prob in zip(tokens, log_probs, strict=True):
            self.tokens.append(token)
            self.log_probs.append(log_prob)
            self.versions.append(version)
            if token in params.stop_token_ids or (params.stop and self._hits_stop(decode)):
                self.finish = FinishReason.STOP
                break
            if self.count >= params.max_tokens:
                self.finish = FinishReason.LENGTH
                break
        if self.seen is not None:
            self.seen[self.tokens[start:]] = True
        self.step_tokens.append(len(self.tokens) - start)
        return self.step_tokens[-1]

    def verified(self, *, levels: int, accepted: int) -> None:
        """Count a verification of a tree of `levels` levels, of which `accepted` stayed."""
        self.verify_ct += 1
        self.num_accepted += accepted
        if levels:
            # Trials until the first failure, as a maximum-likelihood rate of one position.
            rate = accepted / min(levels, accepted + 1)
            self.accept_rate += _NEWEST * (rate - self.accept_rate)

    def learn_ngrams(self) -> None:
        """Bring the group's index up to this request's last token."""
        self.group.index.extend(self.tokens, start=self.indexed)
        self.indexed = len(self.tokens)

    def _hits_stop(self, decode: Callable[[list[int]], str]) -> bool:
        stops = self.group.params.stop
        window = max(map(len, stops)) + _STOP_MARGIN
        text = decode(self.tokens[-min(window, self.count) :])
        return any(stop in text for stop in stops)

    def rollout(self) -> Rollout:
        prompt = self.group.prompt
        return Rollout(
            prompt_id=prompt.prompt_id,
            sample_index=self.sample,
            prompt_tokens=prompt.tokens,
            tokens=tuple(self.tokens[len(prompt.tokens) :]),
            log_probs=tuple(self.log_probs),
            weight_versions=tuple(self.versions),
            finish_reason=self.finish or FinishReason.ABORT,
            verify_ct=self.verify_ct,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            step_tokens=tuple(self.step_tokens),
        )


@dataclass(slots=True)
class Running:
    """The running requests as tensors; row i is slot i. Kept from step to step while nobody comes or goes."""

    requests: list[Request]
    seeds: torch.Tensor
    """`[b]`"""
    counts: torch.Tensor
    """`[b]`, response tokens so far: the counter of the next random number."""
    lengths: torch.Tensor
    """`[b]`, cached positions."""
    last: torch.Tensor
    """`[b]`, the token that is not in the cache yet."""
    sampling: SamplingTensors
    longest: int
    """Largest of `lengths`."""
    even: bool
    """Whether all `lengths` are equal."""

    @staticmethod
    def of(requests: list[Request], *, device: torch.device) -> "Running":
        lengths = [len(r.tokens) - 1 for r in requests]
        columns = (
            [r.seed for r in requests],
            [r.count for r in requests],
            lengths,
            [r.tokens[-1] for r in requests],
        )
        return Running(
            requests,
            *torch.tensor(columns, device=device),
            sampling=sampling_tensors([r.group.params for r in requests], device=device),
            longest=max(lengths),
            even=min(lengths) == max(lengths),
        )

    def advance(self, taken: torch.Tensor, last: torch.Tensor) -> None:
        """Every request took `taken` `[b]` tokens, ending with `last` `[b]`."""
        self.counts += taken
        self.lengths += taken
        self.last = last
        lengths = [len(r.tokens) for r in self.requests]
        self.longest = max(lengths) - 1
        self.even = min(lengths) == max(lengths)


def sampling_tensors(params: Sequence[SamplingParams], *, device: torch.device) -> SamplingTensors:
    """One row a request; a feature that no request uses costs nothing."""

    def column(name: str, neutral: float) -> torch.Tensor | None:
        values = [getattr(p, name) for p in params]
        return None if all(v == neutral for v in values) else torch.tensor(values, device=device)

    return SamplingTensors(
        temperature=column("temperature", 0.0),
        top_k=column("top_k", 0),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        repetition_penalty=column("repetition_penalty", 1.0),
        any_greedy=any(p.temperature == 0 for p in params),
    )
