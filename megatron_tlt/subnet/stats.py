"""What the stages of a run did: speed against the FLOPs' prediction, gradient norms, clipping."""

from dataclasses import dataclass, field

from megatron_tlt.subnet.flops import dense_flops
from megatron_tlt.subnet.schedule import Schedule


@dataclass(kw_only=True, slots=True)
class StageStats:
    """Sums over the steps of one stage."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    grad_norm: float = 0.0
    clipped: int = 0
    """Steps whose gradient norm was above the clipping threshold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What the training loop knows of a step. Example: loss 3.2, grad_norm 0.9, clip 1.0, 8192 tokens."""

    loss: float
    grad_norm: float
    clip_grad: float
    tokens: int
    seconds: float
    updated: bool = True
    """False when the optimizer did not step."""


@dataclass(kw_only=True, slots=True)
class RunStats:
    """Statistics of every stage that has had a step."""

    stages: dict[int, StageStats] = field(default_factory=dict)

    def add(self, stage: int, outcome: StepOutcome, *, flops: float) -> None:
        """Count a step of `stage` that cost `flops` over all ranks."""
        stats = self.stages.setdefault(stage, StageStats())
        stats.steps += 1
        stats.tokens += outcome.tokens
        stats.seconds += outcome.seconds
        stats.flops += flops
        stats.grad_norm += outcome.grad_norm
        stats.clipped += outcome.clip_grad > 0.0 and outcome.grad_norm > outcome.clip_grad

    def metrics(self, stage: int) -> dict[str, float]:
        """Means over the steps of `stage` so far; 0 before its first one."""
        stats = self.stages.get(stage, StageStats())
        steps = max(stats.steps, 1)
        return {
            "est-grad-norm": stats.grad_norm / steps,
            "est-clip-fraction": stats.clipped / steps,
        }

    def rows(self, schedule: Schedule) -> list[dict[str, float]]:
        """One row a stage. `flops`: its FLOPs per token over the dense model's. `predicted` and `measured`:
        its FLOPs and its seconds per token over those of the last stage that has run, which in the end is
        the full model."""
        dense = dense_flops(schedule.shape).total
        if not self.stages:
            return []
        last = self.stages[max(self.stages)]
        return [
            {
                "stage": number,
                "steps": stats.steps,
                "grad_norm": stats.grad_norm / stats.steps,
                "clip_fraction": stats.clipped / stats.steps,
                "seconds_per_token": stats.seconds / stats.tokens,
                "flops": stats.flops / stats.tokens / dense,
                "predicted": (stats.flops / stats.tokens) / (last.flops / last.tokens),
                "measured": (stats.seconds / stats.tokens) / (last.seconds / last.tokens),
            }
            for number, stats in sorted(self.stages.items())
        ]

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {
            str(number): {name: getattr(stats, name) for name in StageStats.__slots__}
            for number, stats in self.stages.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self.stages = {int(number): StageStats(**values) for number, values in state.items()}
