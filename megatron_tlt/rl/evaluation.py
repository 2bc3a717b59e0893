"""Held-out sets through the same engine and rewards: avg@k, unbiased pass@k, length, truncation ratio."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_tlt.data.prompts import PromptSet
from megatron_tlt.rl.generation import Generator
from megatron_tlt.rl.metrics import evaluation_metrics
from megatron_tlt.types import SamplingParams


@dataclass(kw_only=True, slots=True)
class Evaluator:
    """Several sets of prompts and how to draw from the policy."""

    generator: Generator
    sets: Mapping[str, PromptSet]
    params: SamplingParams

    def evaluate(self) -> dict[str, float]:
        """Metrics of all sets (`eval/<set>...`); collective over the world.

        The draws depend on the seed and the prompt alone, so two values differ by the weights. Verdicts
        count, not the format bonus; a response without a verdict counts as wrong.
        """
        metrics: dict[str, float] = {}
        for name, prompts in self.sets.items():
            samples = self.generator.run(
                prompts.records, self.params, step=0, phases=("evaluate", "evaluate")
            )
            scores: list[list[float]] = [[] for _ in prompts.records]
            for sample in samples:
                scores[sample.group].append(sample.reward.verdict if sample.usable else 0.0)
            metrics |= evaluation_metrics(
                name,
                scores,
                lengths=[len(s.rollout.tokens) for s in samples],
                truncated=[s.truncated for s in samples],
            )
        return metrics
