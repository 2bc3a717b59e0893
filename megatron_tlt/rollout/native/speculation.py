"""Which drafters an engine has, and the draft that a strategy asks of one of them."""

from megatron_tlt.rollout.native.config import NativeEngineConfig
from megatron_tlt.rollout.native.draft import Draft
from megatron_tlt.rollout.native.drafters import Drafter, NgramDrafter, SubnetDrafter
from megatron_tlt.rollout.native.eagle import EagleModel, EagleRunner
from megatron_tlt.rollout.native.eagle_drafter import EagleDrafter
from megatron_tlt.rollout.native.request import Running
from megatron_tlt.rollout.native.runner import Runner
from megatron_tlt.types import OFF, Strategy


class Speculation:
    """Drafters by name: ngram always, subnet for a target of two layers and more, eagle and hybrid with
    weights.
    """

    def __init__(self, runner: Runner, config: NativeEngineConfig, eagle: EagleModel | None) -> None:
        self.runner, self.config, self.eagle = runner, config, eagle
        self.drafters: dict[str, Drafter] = {"ngram": NgramDrafter(device=runner.model.device)}
        layers = runner.model.shape.num_layers
        if layers > 1:
            kept = config.subnet_layers or range(layers // 2)
            self.drafters["subnet"] = SubnetDrafter(
                runner, layers=kept, rejection=config.verification == "rejection"
            )

    def enable_eagle(self) -> None:
        """The drafter's weights are there: offer eagle and hybrid."""
        drafter = EagleRunner(self.eagle, self.runner.cache, chunk=self.config.prefill_chunk)
        for name, hybrid in (("eagle", False), ("hybrid", True)):
            self.drafters[name] = EagleDrafter(
                drafter, max_nodes=self.config.max_draft_tokens, hybrid=hybrid,
                rejection=self.config.verification == "rejection",
            )  # fmt: skip

    def agree(self, strategy: Strategy) -> Strategy:
        """With tensor parallelism every rank runs the first rank's choice."""
        tp = self.runner.model.tp
        if tp.size == 1:
            return strategy
        names = ["off", *self.drafters]
        code = (
            names.index(strategy.drafter), strategy.num_steps, strategy.topk, strategy.num_draft_tokens,
        )  # fmt: skip
        name, steps, topk, tokens = tp.agree(code)
        return Strategy(drafter=names[name], num_steps=steps, topk=topk, num_draft_tokens=tokens)

    def check(self, strategy: Strategy) -> None:
        """Raises ValueError for a strategy that this engine cannot run."""
        if strategy.drafter not in self.drafters:
            raise ValueError(
                f"strategy {strategy}: this engine drafts by {sorted(self.drafters)}; eagle and hybrid need "
                "a drafter and update_weights('draft', ...)"
            )
        if strategy.topk > 1 and strategy.drafter in ("ngram", "subnet"):
            raise ValueError(f"strategy {strategy}: {strategy.drafter} drafts chains, use topk=1")
        most = max(strategy.num_steps, strategy.num_draft_tokens - 1)
        if most > self.config.max_draft_tokens:
            raise ValueError(
                f"strategy {strategy} drafts up to {most} tokens, max_draft_tokens is "
                f"{self.config.max_draft_tokens}: raise it"
            )

    def draft(self, running: Running, strategy: Strategy) -> Draft | None:
        """What to verify in this step; None where there is nothing."""
        if strategy == OFF:
            return None
        self.check(strategy)
        left = max(r.group.params.max_tokens - r.count for r in running.requests) - 1
        levels = min(strategy.num_steps, left)
        if levels < 1:
            return None
        return self.drafters[strategy.drafter].propose(running, strategy, levels=levels)

