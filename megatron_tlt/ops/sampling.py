"""Token sampling: counter-based random numbers, truncation and log-probs.

Shapes: b rows, v vocabulary. Every row has its own parameters, so requests with different settings share
one call. A row's result depends on its own logits and counter alone, never on its neighbours.
"""

from dataclasses import dataclass, replace

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TOP_CANDIDATES = 256

# Streams beside the one that draws a token: a seed xor one of these is another seed.
DRAFT_STREAM, ACCEPT_STREAM, FINAL_STREAM = 0x5DEECE66D1CE4E5, 0x2545F4914F6CDD1D, 0x3C6EF372FE94F82B


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def stream_seed(*counters: int) -> int:
    """Seed of one random stream, a signed 64-bit hash of (seed, step, prompt_id, sample, ...).

    A counter-based generator (splitmix64, Steele et al. 2014) in place of generator state: the number drawn
    for a token depends on these counters and its position, not on what else runs.
    """
    state = 0
    for counter in counters:
        state = _splitmix64(state ^ (counter & _MASK))
    return _signed(state)


def uniforms(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, for int64 `seeds` and `counters` that broadcast together."""
    x = seeds + (counters + 1) * _signed(_GOLDEN)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 12) & ((1 << 52) - 1)).to(torch.float64) * 2.0**-52


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTensors:
    """Parameters of b rows; None where no row uses the feature."""

    temperature: torch.Tensor | None
    """`[b]`; rows with 0 are greedy. None: all greedy."""
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    repetition_penalty: torch.Tensor | None = None
    any_greedy: bool = False

    def take(self, rows: torch.Tensor) -> "SamplingTensors":
        """The parameters of `rows` (an index with repeats, such as one entry per tree node)."""
        pick = {
            name: None if (value := getattr(self, name)) is None else value[rows]
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        }
        return SamplingTensors(**pick, any_greedy=self.any_greedy)

    def without_penalty(self) -> "SamplingTensors":
        return replace(self, repetition_penalty=None)


def penalize(logits: torch.Tensor, *, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Repetition penalty (CTRL, Keskar et al. 2019) on `[b, v]`; `seen` is bool `[b, v]`."""
    scale = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / scale, logits * scale), logits)


def truncate(
    probs: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Zero what top-k, then top-p (on the renormalised rest), then min-p drop; not renormalised.

    Each rule is a threshold on probability, so equal probabilities stay or go together. `[b, v]` in, same
    shape out; `top_k` 0, `top_p` 1 and `min_p` 0 leave a row as it is.
    """
    threshold = torch.zeros_like(probs[:, :1])
    if top_k is not None or top_p is not None:
        threshold = _rank_threshold(probs, top_k=top_k, top_p=top_p)
    if min_p is not None:
        threshold = torch.maximum(threshold, min_p[:, None] * probs.amax(-1, keepdim=True))
    return torch.where(probs >= threshold, probs, 0.0)


def _rank_threshold(
    probs: torch.Tensor, *, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Smallest probability that top-k and top-p keep, `[b, 1]`."""
    vocab = probs.shape[-1]
    k = torch.full(probs.shape[:1], vocab, device=probs.device)
    if top_k is not None:
        k = torch.where(top_k > 0, top_k.clamp(max=vocab), k)
    p = torch.ones_like(probs[:, 0]) if top_p is None else top_p
    limited = bool((k < vocab).all())
    count = int(k.max()) if limited else min(vocab, _TOP_CANDIDATES)
    largest = probs.topk(count).values  # [b, c], descending
    if not limited and not _covers(largest, vocab=vocab, k=k, p=p):
        largest = probs.sort(-1, descending=True).values
    rank = torch.arange(largest.shape[-1], device=probs.device)
    kept = torch.where(rank < k[:, None], largest, 0.0)
    # The whole mass is 1 where top-k keeps everything, even what `largest` does not show.
    mass = torch.where(k < vocab, kept.sum(-1), probs.sum(-1))[:, None]
    before = kept.cumsum(-1) - kept
    keep = (rank < k[:, None]) & (before < p[:, None] * mass)
    last = keep.sum(-1, keepdim=True) - 1
    threshold = largest.gather(-1, last.clamp(min=0))
    return torch.where((k[:, None] >= vocab) & (p[:, None] >= 1), 0.0, threshold)


def _covers(largest: torch.Tensor, *, vocab: int, k: torch.Tensor, p: torch.Tensor) -> bool:
    """Whether the listed candidates decide every row: its top-k fits, or its top-p mass is inside."""
    inside = (p >= 1) | (largest.sum(-1) > p + 1e-4)
    return bool(((k <= largest.shape[-1]) | (k >= vocab) & inside).all())


def target_probs(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The distribution that tokens are drawn from, `[b, v]`, float32, normalised.

    `logits` must carry the repetition penalty already. Greedy rows become one-hot at their argmax.
    """
    greedy = params.temperature is None
    if not greedy:
        safe = torch.where(params.temperature > 0, params.temperature, 1.0)
        probs = torch.softmax(logits.float() / safe[:, None], -1)
        if params.top_k is not None or params.top_p is not None or params.min_p is not None:
            probs = truncate(probs, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
            probs = probs / probs.sum(-1, keepdim=True)
        if not params.any_greedy:
            return probs
    one_hot = torch.zeros_like(logits, dtype=torch.float32)
    one_hot.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if greedy:
        return one_hot
    return torch.where(params.temperature[:, None] > 0, probs, one_hot)


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token a row: the first whose cumulated probability exceeds `uniform` `[b]`.

    Sums in float64, so that a vocabulary of 10^5 tokens keeps its small probabilities. Tokens of
    probability 0 are never drawn. `probs` need not be normalised.
    """
    cumulated = probs.cumsum(-1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(-1)


def sample(
    logits: torch.Tensor,
    params: SamplingTensors,
    *,
    uniform: torch.Tensor | None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token for each row of `logits` `[b, v]`: `[b]`, int64.

    `uniform` `[b]` float64 is needed unless all rows are greedy; `seen` `[b, v]` where a row has a
    repetition penalty.
    """
    if params.repetition_penalty is not None:
        logits = penalize(logits, seen=seen, penalty=params.repetition_penalty)
    if params.temperature is None:
        return logits.argmax(-1)
    return inverse_cdf(target_probs(logits, params), uniform)


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: torch.Tensor | None
) -> torch.Tensor:
    """Log-probability of `tokens` `[b]` under `logits` `[b, v]` at `temperature`, float32.

    Whole vocabulary, before penalty and truncation; rows with temperature 0 (or None) count as 1.
    """
    scaled = logits.float()
    if temperature is not None:
        scaled = scaled / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return scaled.gather(-1, tokens[:, None]).squeeze(-1) - scaled.logsumexp(-1)
