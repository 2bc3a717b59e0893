"""A look at an engine before a run: does it speak as the trainer's model does, do its drafts fit?"""

from collections.abc import Callable, Sequence

from megatron_tlt.rollout.sglang.engine import SglangEngine
from megatron_tlt.rollout.sglang.shared import SharedEngine
from megatron_tlt.types import Prompt, Rollout, SamplingParams

_PROBE_ID = -1


def probe_engine(
    engine: SglangEngine | SharedEngine,
    tokens: Sequence[int],
    *,
    difference: Callable[[Rollout], float] | None = None,
    params: SamplingParams = SamplingParams(temperature=0, max_tokens=32),
    max_log_prob_diff: float = 1e-2,
    min_accept_length: float = 1.0,
) -> dict[str, float]:
    """Continue one prompt: {"accept_length", "max_log_prob_diff"}, each where it was looked at.

    `difference`: the largest one, at a token, between the response's log-probability and the trainer's. A
    drafter that has been trained should be held to `min_accept_length` above 1 (1, as of a fresh one: nothing
    accepted). Raises ValueError that says what to look for.
    """
    prompt = Prompt(prompt_id=_PROBE_ID, tokens=tuple(tokens))
    (rollout,) = engine.generate([prompt], params)
    report: dict[str, float] = {}
    if difference is not None:
        worst = report["max_log_prob_diff"] = difference(rollout)
        if not worst <= max_log_prob_diff:
            raise ValueError(
                f"log-probabilities of SGLang and trainer differ by up to {worst:.3g} (allowed "
                f"{max_log_prob_diff:g}): other weights, rope_theta, rope_scaling, norm epsilon or dtype"
            )
    if rollout.verify_ct:
        report["accept_length"] = rollout.accept_length
        if rollout.accept_length < min_accept_length:
            raise ValueError(
                f"accept length {rollout.accept_length:.3f}, wanted {min_accept_length:g}: drafts are hardly "
                "ever accepted. Look for a drafter of another target or training step, other feature layers "
                "(eagle_aux_hidden_state_layer_ids), another rope_theta, fewer max_position_embeddings, or a "
                "draft vocabulary (d2t) that is another"
            )
    return report
