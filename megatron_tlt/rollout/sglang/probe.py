"""A look at an engine before a run: does it speak as the trainer's model does, do its drafts fit?"""

from collections.abc import Callable, Sequence

from megatron_tlt.rollout.sglang.engine import SglangEngine
from megatron_tlt.types import Prompt, SamplingParams

_PROBE_ID = -1


def probe_engine(
    engine: SglangEngine,
    tokens: Sequence[int],
    *,
    log_probs: Callable[[tuple[int, ...]], list[float]] | None = None,
    max_tokens: int = 32,
    max_log_prob_diff: float = 1e-2,
    min_accept_length: float = 1.0,
) -> dict[str, float]:
    """Continue one prompt greedily: {"accept_length", "max_log_prob_diff"}, each where it was looked at.

    `log_probs` gives the trainer's log-probability of each token of a sequence but the first. A drafter that
    has been trained should be held to `min_accept_length` above 1 (1, as of a fresh one: nothing accepted).
    Raises ValueError that says what to look for.
    """
    prompt = Prompt(prompt_id=_PROBE_ID, tokens=tuple(tokens))
    (rollout,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens))
    report: dict[str, float] = {}
    if log_probs is not None:
        wanted = log_probs(prompt.tokens + rollout.tokens)[len(prompt.tokens) - 1 :]
        worst = max(abs(a - b) for a, b in zip(rollout.log_probs, wanted, strict=True))
        report["max_log_prob_diff"] = worst
        if worst > max_log_prob_diff:
            raise ValueError(
                f"log-probabilities of SGLang and trainer differ by up to {worst:.3g} (allowed "
                f"{max_log_prob_diff:g}): other weights, rope_theta, rope_scaling, norm epsilon or dtype"
            )
    if rollout.verify_ct:
        report["accept_length"] = rollout.accept_length
        if rollout.accept_length < min_accept_length:
            raise ValueError(
                f"accept length {rollout.accept_length:.3f} of at most "
                f"{engine.config.strategy.num_steps + 1}, wanted {min_accept_length:g}: drafts are hardly "
                "ever accepted. Look for a drafter of another target or training step, other feature layers "
                "(eagle_aux_hidden_state_layer_ids), another rope_theta, fewer max_position_embeddings, or a "
                "draft vocabulary (d2t) that is another"
            )
    return report
