"""The embedded engine over two tensor-parallel ranks says what one rank says."""

import pytest
import torch

from megatron_tlt.types import SamplingParams
from tests.dist.rollout_tasks import generate
from tests.dist.workers import run_distributed


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_two_ranks_say_what_one_says(kind):
    params = SamplingParams(n=2, temperature=0.8, top_p=0.9, max_tokens=30, seed=2)
    one, _ = generate(kind, params, 1)
    (first, stats), (second, _) = run_distributed(generate, 2, kind, params, 2)
    assert [r.tokens for r in first] == [r.tokens for r in one] == [r.tokens for r in second]
    for a, b in zip(one, first, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4, rtol=1e-4
        )
    assert stats.drafted > 0 and stats.accept_length > 1
