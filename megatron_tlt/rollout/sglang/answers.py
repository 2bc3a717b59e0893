"""Between our records and SGLang's: sampling parameters one way, responses and hidden states the other."""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch

from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.types import FeatureSample, FinishReason, Prompt, Rollout, SamplingParams, Strategy

NOTHING = {
    "tokens": [], "log_probs": [], "versions": [], "version": None, "finish": "abort", "verify_ct": 0,
    "num_drafted": 0, "num_accepted": 0, "retractions": 0, "cached": 0,
}  # fmt: skip
"""The answer of a request that ended before it began."""


def check_sampling(params: SamplingParams) -> None:
    """Raise ValueError for what SGLang cannot do token-in, token-out, with the target's log-probabilities."""
    if params.stop or params.repetition_penalty != 1:
        raise ValueError(
            f"stop={params.stop}, repetition_penalty={params.repetition_penalty}: SGLang rollouts take "
            "neither (text stays outside, and penalties change the log-probabilities); use stop_token_ids, "
            "or rollout.engine native"
        )


def check_speculation(params: SamplingParams, strategy: Strategy, *, device: str) -> None:
    """Raise ValueError where SGLang 0.5.21 would speculate, but not draw from the distribution asked for."""
    if strategy.drafter == "off" or params.temperature == 0:
        return
    if params.min_p > 0:
        raise ValueError(f"min_p={params.min_p} with {strategy}: SGLang's verification leaves min_p out")
    if device == "cpu" and not plugin_is_installed():
        raise ValueError(
            f"temperature={params.temperature} with {strategy} on a CPU: SGLang verifies greedily there and "
            "would draw no samples; install this package (pip install --no-deps -e .), whose plugin mends "
            "it, or use temperature 0 or strategy off"
        )


def check_drafter(strategy: Strategy, drafter: DrafterConfig | None) -> None:
    """Raise ValueError where strategy and drafter do not go together, or EAGLE-3 lacks our plugin."""
    if (strategy.drafter == "eagle") != (drafter is not None):
        raise ValueError(
            f"strategy {strategy} with drafter={drafter}: strategy.drafter='eagle' and a DrafterConfig go "
            "together"
        )
    if drafter is not None and drafter.layout == "eagle3" and not plugin_is_installed():
        raise ValueError(
            "EAGLE-3 in SGLang needs this package's plugin, which hands out the target's final states: "
            "install it (pip install --no-deps -e .)"
        )


def plugin_is_installed() -> bool:
    """Whether SGLang's processes will find our entry point."""
    found = importlib.metadata.entry_points(group="sglang.srt.plugins")
    return any(entry.value.startswith("megatron_tlt.") for entry in found)


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """SGLang's sampling parameters of one sample."""
    return {
        "max_new_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "top_k": params.top_k or -1, "min_p": params.min_p,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": not params.stop_token_ids,  # it would switch stop_token_ids off, too
    }  # fmt: skip


def rollout_of(
    prompt: Prompt, sample: int, value: Mapping[str, Any], *, max_tokens: int
) -> Rollout:
    """Raises ValueError where counts of tokens, log-probabilities and versions disagree, or where SGLang cut
    the response short of `max_tokens` for want of context or cache, which it does without a word."""
    tokens, log_probs = tuple(value["tokens"]), tuple(value["log_probs"])
    versions = versions_of(value["versions"], value["version"], len(tokens))
    if len(tokens) != len(log_probs):
        raise ValueError(
            f"prompt {prompt.prompt_id}: SGLang gave {len(tokens)} tokens and {len(log_probs)} log-probs"
        )
    if value["finish"] == FinishReason.LENGTH and len(tokens) < max_tokens:
        raise ValueError(
            f"prompt {prompt.prompt_id} of {len(prompt.tokens)} tokens: SGLang ended the response after "
            f"{len(tokens)} of {max_tokens} tokens: its key/value cache is too small (max_total_tokens, or "
            "mem_fraction_static in arguments)"
        )
    verify_ct, accepted = value["verify_ct"], value["num_accepted"]
    return Rollout(
        prompt_id=prompt.prompt_id, sample_index=sample, prompt_tokens=prompt.tokens, tokens=tokens,
        log_probs=log_probs, weight_versions=versions, finish_reason=FinishReason(value["finish"]),
        verify_ct=verify_ct, num_drafted=value["num_drafted"], num_accepted=accepted,
        step_tokens=() if verify_ct else (1,) * len(tokens),
    )  # fmt: skip


def versions_of(spans: list[dict[str, Any]], last: str | None, count: int) -> tuple[int, ...]:
    """One version a token, from spans {"version", "start", "end"}; `last` where SGLang names no spans."""
    versions: list[int | None] = [None if last is None else int(last)] * count
    for span in spans:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count or None in versions:
        raise ValueError(f"weight versions {spans} do not cover {count} tokens")
    return tuple(versions)


def feature_sample(
    rollout: Rollout, states: Mapping[str, torch.Tensor], *, context_rows: int, feature_size: int
) -> FeatureSample | None:
    """The target's states behind each token, after those of the prompt's last tokens.

    `states`: "prompt" `[p, h]`, the rows that were computed (fewer than the prompt where SGLang's radix cache
    had its beginning), and "decoded" `[n, h]`; of an EAGLE-3 engine `feature_size` inner states and then the
    final ones. None where the response has no tokens, several versions, or fewer rows than tokens.
    """
    prompt, decoded = states["prompt"], states["decoded"]
    more = len(rollout.tokens) - 1
    if more < 0 or len(set(rollout.weight_versions)) != 1 or len(decoded) < more or not len(prompt):
        return None
    context = min(context_rows, len(prompt) - 1)
    before = rollout.prompt_tokens
    rows = torch.cat((prompt[len(prompt) - 1 - context :], decoded[:more]))
    inner, final = rows[:, :feature_size].contiguous(), rows[:, feature_size:].contiguous()
    return FeatureSample(
        prompt_id=rollout.prompt_id, sample_index=rollout.sample_index, tokens=rollout.tokens,
        hidden=inner, last_hidden=final if final.shape[1] else None,
        weight_version=rollout.weight_versions[0],
        context_tokens=before[len(before) - context :] if context else (),
    )  # fmt: skip
