"""What the stages of a run did: speed against the FLOPs' prediction, gradient norms, clipping."""

from dataclasses import dataclass, field

from megatron_tlt.subnet.flops import dense_flops, stage_flops
from megatron_tlt.subnet.schedule import Schedule


@dataclass(kw_only=True, slots=True)
class StageStats:
    """Sums over the steps of one stage."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
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


@dataclass(kw_only=True, slots=True)
class RunStats:
    """Statistics of every stage that has had a step."""

    stages: dict[int, StageStats] = field(default_factory=dict)

    def add(self, stage: int, outcome: StepOutcome) -> None:
        """Count a step of `stage`."""
        stats = self.stages.setdefault(stage, StageStats())
        stats.steps += 1
        stats.tokens += outcome.tokens
        stats.seconds += outcome.seconds
        stats.grad_norm += outcome.grad_norm
        stats.clipped += outcome.clip_grad > 0.0 and outcome.grad_norm > outcome.clip_grad

    def rows(self, schedule: Schedule) -> list[dict[str, float]]:
        """One row a stage. `predicted`: its FLOPs per token over the dense model's; `measured`: its seconds
        per token over the full stage's, where that has run."""
        dense = dense_flops(schedule.shape).total
        full = self.stages.get(len(schedule.stages) - 1)
        rows = []
        for number, stats in sorted(self.stages.items()):
            row = {
                "stage": number,
                "steps": stats.steps,
                "grad_norm": stats.grad_norm / stats.steps,
                "clip_fraction": stats.clipped / stats.steps,
                "seconds_per_token": stats.seconds / max(stats.tokens, 1),
                "predicted": stage_flops(schedule, schedule.stages[number]).total / dense,
            }
            if full is not None and full.seconds > 0.0:
                per_token = full.seconds / max(full.tokens, 1)
                row["measured"] = row["seconds_per_token"] / per_token
            rows.append(row)
        return rows

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {
            str(number): {name: getattr(stats, name) for name in StageStats.__slots__}
            for number, stats in self.stages.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self.stages = {int(number): StageStats(**values) for number, values in state.items()}
