"""Whether sampled responses follow their model: a chi-square test, and their log-probabilities."""

from collections.abc import Sequence

import torch
import transformers

from megatron_tlt.types import Rollout
from tests.sglang.models import VOCAB


def check_samples(
    model: transformers.PreTrainedModel, rollouts: Sequence[Rollout], *, temperature: float, top_k: int
) -> None:
    """Samples of one prompt, of at least four tokens: the first three tokens, each given the ones before."""
    prompt = rollouts[0].prompt_tokens
    pairs = [(r.tokens[:i], r.tokens[i]) for r in rollouts for i in (0, 1, 2)]
    statistic = freedom = 0.0
    for prefix in sorted({prefix for prefix, _ in pairs}):
        drawn = [token for other, token in pairs if other == prefix]
        if len(drawn) < 40:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + prefix])).logits[0, -1] / temperature
        kept = logits.topk(top_k).indices
        expected = torch.zeros(VOCAB).scatter_(0, kept, torch.softmax(logits[kept], 0)) * len(drawn)
        observed = torch.bincount(torch.tensor(drawn), minlength=VOCAB)
        assert not observed[expected == 0].any()
        big = expected > 5
        statistic += float(((observed - expected).square() / expected)[big].sum())
        freedom += max(int(big.sum()) - 1, 0)
    assert freedom >= 5 and statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)
    for rollout in rollouts[:20]:
        ids = torch.tensor([rollout.prompt_tokens + rollout.tokens])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(rollout.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.log_probs), wanted, atol=1e-4, rtol=1e-4)
