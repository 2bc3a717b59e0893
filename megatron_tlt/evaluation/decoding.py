"""Token-by-token generation with a key/value cache, under any TP and PP, and text as it becomes readable.

Meant for looking at a checkpoint: one sequence, correctness first. Every rank draws the same token, for
logits and random numbers are the same everywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_tlt import device
from megatron_tlt.models.gpt import GPT
from megatron_tlt.models.logits import IncrementalModel
from megatron_tlt.ops.sampling import SamplingTensors, sample, stream_seed, uniforms
from megatron_tlt.parallel import Parallel

import torch

_UNFINISHED = "\ufffd"  # what a part of a multi-byte character decodes to


@dataclass(kw_only=True, slots=True)
class DecodingConfig:
    """How the next token is chosen, and when to stop."""

    max_new_tokens: int = 128
    """Stop after this many tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token (greedy); higher is more random, 1 is the model's own distribution."""
    top_k: int = 0
    """Draw among the k likeliest tokens; 0: no limit."""
    top_p: float = 1.0
    """Then draw among the likeliest tokens that together have this probability (nucleus)."""
    seed: int = 1234
    """Seed of the draws; same seed, same text."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.temperature < 0.0:
            raise ValueError(f"temperature={self.temperature} must be at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0: no limit)")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")


def generate_tokens(
    chunks: list[GPT],
    parallel: Parallel,
    prompt: Sequence[int],
    config: DecodingConfig,
    *,
    eos: int | None,
) -> Iterator[int]:
    """New tokens after `prompt`, one at a time, `eos` included; the same on every rank.

    Collective over the model's ranks, all of which must consume alike. Raises ValueError for an empty
    prompt and where prompt and new tokens exceed a learned position table.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens: give at least one")
    model = IncrementalModel(
        chunks, parallel, batch_size=1, max_length=len(prompt) + config.max_new_tokens
    )
    where = device.device()
    params = _sampling_tensors(config, where)
    stream = torch.tensor([stream_seed(config.seed)], device=where)
    new = torch.tensor([list(prompt)], device=where)
    for number in range(config.max_new_tokens):
        logits = model.append(new)  # [1, v]
        uniform = uniforms(stream, torch.tensor([number], device=where))
        token = sample(logits, params, uniform=uniform)
        yield int(token)
        if int(token) == eos and not config.ignore_eos:
            return
        new = token[:, None]


def _sampling_tensors(config: DecodingConfig, where: torch.device) -> SamplingTensors:
    if config.temperature == 0.0:
        return SamplingTensors(temperature=None)
    return SamplingTensors(
        temperature=torch.tensor([config.temperature], device=where),
        top_k=torch.tensor([config.top_k], device=where) if config.top_k else None,
        top_p=torch.tensor([config.top_p], device=where) if config.top_p < 1.0 else None,
    )


class TextStream:
    """Text of tokens that arrive one by one; the pieces joined are the text of all tokens.

    A piece is held back while it ends inside a multi-byte character. Tokens are decoded together with
    the few before them, for a tokenizer may drop the blank before a text's first word.
    """

    def __init__(
        self, detokenize: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()
    ) -> None:
        self._detokenize = detokenize
        self._ids = list(prompt[-8:])
        self._start, self._shown = 0, len(self._ids)

    def add(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._ids.append(token)
        return self._take(keep_unfinished=True)

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._take(keep_unfinished=False)

    def _take(self, *, keep_unfinished: bool) -> str:
        before = self._detokenize(self._ids[self._start : self._shown])
        now = self._detokenize(self._ids[self._start :])
        if keep_unfinished and now.endswith(_UNFINISHED):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return now[len(before) :]
