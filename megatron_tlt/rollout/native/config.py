"""Sizes of the embedded engine."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(kw_only=True, slots=True)
class NativeEngineConfig:
    """Sizes of the embedded engine."""

    max_model_len: int = 1024
    """Longest prompt plus response, in tokens."""
    max_batch: int = 32
    """Most requests that decode at the same time."""
    kv_cache_bytes: int | None = None
    """Bound on this rank's cache of keys, values and drafter state. Requests that do not fit are preempted
    and computed again later. None: room for max_batch requests of max_model_len."""
    max_draft_tokens: int = 16
    """Most draft tokens of one request's verification, and most nodes that a drafter expands for it."""
    prefill_chunk: int = 2048
    """Most prompt tokens of one forward."""
    subnet_layers: tuple[int, ...] = ()
    """Layers of the target that draft under the strategy "subnet"; empty: the first half."""
    max_ngrams: int = 1 << 22
    """Most n-grams that are remembered over all prompts."""
    verification: Literal["shared", "rejection"] = "shared"
    """How chains that a model drafts are accepted. "shared": a draft stays where it is the token that the
    target draws with that position's own random number, so a response does not depend on speculation.
    "rejection": p/q rejection sampling, which keeps the distribution but not the very tokens."""
    dtype: torch.dtype = torch.float32
    """Type of weights and cache."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_batch", "max_draft_tokens", "prefill_chunk", "max_ngrams"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.verification not in ("shared", "rejection"):
            raise ValueError(f"verification={self.verification!r} is neither 'shared' nor 'rejection'")
