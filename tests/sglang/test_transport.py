"""The ways of new weights into a running engine, each on the real SGLang."""

import os
import signal

import pytest

from megatron_tlt.rollout.checksum import weights_checksum
from megatron_tlt.types import Prompt, SamplingParams
from tests.sglang.models import CHAIN, PROMPTS, exact_pair, native_engine, sglang_engine, target, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=40)


def accepted(rollouts) -> float:
    return sum(r.num_accepted for r in rollouts) / sum(r.verify_ct for r in rollouts)


@pytest.mark.parametrize("transport", ["tensor", "group"])
def test_weights_arrive_whole_in_mid_response_for_target_and_draft_and_through_an_engines_death(transport):
    """In buckets of a few tensors. What the default, the folder, does in test_engine and test_eagle."""
    model, drafter = exact_pair()
    other = target(seed=2, layers=1)
    engine = sglang_engine(
        model, drafter=drafter, strategy=CHAIN, weight_transport=transport, bucket_bytes=10_000
    )
    try:
        bad = {name: tensor * 0 for name, tensor in drafter.state_dict().items()}
        lengths = []
        for draft in (bad, drafter.state_dict()):
            engine.update_weights("draft", draft.items(), version=2)
            rollouts = engine.generate(PROMPTS, GREEDY)
            assert tokens_of(rollouts) == tokens_of(native_engine(model).generate(PROMPTS, GREEDY))
            lengths.append(accepted(rollouts))
        assert lengths[0] < 0.3 and lengths[1] > 2.7

        long = SamplingParams(temperature=0, max_tokens=130)
        engine.submit(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
        engine.submit([Prompt(prompt_id=9, tokens=PROMPTS[1].tokens)], long)
        stream = engine.stream()
        assert next(stream).prompt_id == 0
        pairs = list(other.state_dict().items())
        engine.update_weights("target", pairs, version=2, checksum=weights_checksum(pairs))
        (rest,) = stream
        assert len(rest.tokens) == 130 and set(rest.weight_versions) == {1, 2}
        assert engine.engine_checksum() == weights_checksum(pairs)
        with pytest.raises(ValueError, match="were not given"):
            engine.update_weights("target", pairs[:-1], version=3)
        expected = tokens_of(native_engine(other).generate(PROMPTS, GREEDY))
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected

        os.kill(engine.check_health()["pids"][0], signal.SIGKILL)
        pairs = list(model.state_dict().items())
        engine.update_weights("target", pairs, version=4)  # the new engine starts from them
        rollouts = engine.generate(PROMPTS, GREEDY)
        assert engine.restarts == 1 and set(rollouts[0].weight_versions) == {4}
        assert tokens_of(rollouts) == tokens_of(native_engine(model).generate(PROMPTS, GREEDY))
        engine.update_weights("target", other.state_dict().items(), version=5)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected
    finally:
        engine.close()
