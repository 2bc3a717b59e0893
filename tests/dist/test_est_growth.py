"""At each growth the training loss drops and never jumps: the grown subnet on the weights and samples of the
one before."""

import pytest

from megatron_tlt.data.sampler import collate
from megatron_tlt.parallel import init_parallel
from megatron_tlt.subnet.stats import StepOutcome
from megatron_tlt.train.setup import build_run
from megatron_tlt.train.step import evaluate, train_step
from tests.dist.runs import run_config

import torch

ENDS, BATCH, LAST = [40, 80], 8, 8
STEPS = 121
EST = {"schedule": "practical", "ends": ENDS, "ends_in": "steps"}
WIDTHS = {"layers": 1, "order": ["heads+mlp"], "ends": ENDS[:1]}
NESTED = {"draw": "nested", "resample_interval": "stage", "output_scale": "none"}
TOLERANCE = 0.02


class Probe:
    """A run whose subnets can be looked at between two steps."""

    def __init__(self, folder, preset: str, est: dict) -> None:
        torch.set_num_threads(1)
        training = {"train_iters": STEPS, "global_batch_size": BATCH, "micro_batch_size": BATCH}
        config = run_config(
            folder, preset=preset, est=EST | est, training=training,
            optimizer={"lr": 3e-3, "lr_warmup_iters": 10},
        )  # fmt: skip
        self.run = build_run(config, init_parallel(config.parallel, seed=1))

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return collate([self.run.train_data[step * BATCH + i] for i in range(BATCH)])

    def train(self, step: int) -> None:
        run = self.run
        run.subnets.begin_step(step)
        result = train_step(run.chunks, run.optimizer, [self.batch(step)], parallel=run.parallel)
        run.scheduler.step(increment=BATCH)
        run.subnets.end_step(
            StepOutcome(loss=result.loss, grad_norm=result.grad_norm, clip_grad=1.0, tokens=1, seconds=1.0)
        )

    def loss(self, plan_of: int) -> float:
        """Of the subnet of step `plan_of`, over samples that come later."""
        run = self.run
        run.subnets.begin_step(plan_of)
        batches = [self.batch(STEPS - 1 - i) for i in range(4)]
        loss, _ = evaluate(
            run.chunks, iter(batches), num_microbatches=len(batches), parallel=run.parallel
        )
        return loss


def drops(folder, preset: str, est: dict) -> list[float]:
    """At each growth: mean loss of the last subnets before it, minus the loss of the first one after it."""
    probe, found = Probe(folder, preset, est), []
    starts = [stage.start for stage in probe.run.subnets.schedule.stages[1:]]
    for step in range(max(starts)):
        probe.train(step)
        if step + 1 in starts:
            before = [probe.loss(step - i) for i in range(LAST)]
            found.append(sum(before) / LAST - probe.loss(step + 1))
    return found


@pytest.mark.parametrize("preset", ["tiny-gpt2", "tiny-llama"])
def test_the_loss_drops_when_heads_and_neurons_drawn_at_random_become_all(preset, tmp_path):
    assert min(drops(tmp_path, preset, WIDTHS)) > 0.0


def test_the_loss_drops_at_each_growth_of_the_practical_schedule(tmp_path):
    """Of a tiny GPT-2 with random depth alone this is not true: its layers were never trained together."""
    assert min(drops(tmp_path, "tiny-llama", {"ends": [60, 120]})) > -TOLERANCE


@pytest.mark.parametrize("preset", ["tiny-gpt2", "tiny-llama"])
def test_a_nested_subnet_without_output_scale_goes_on_where_it_was(preset, tmp_path):
    """What joins is as it was drawn: small. Steps are trained on, so the loss need not drop at once."""
    assert min(drops(tmp_path, preset, NESTED)) > -TOLERANCE


def test_a_nested_subnet_with_output_scale_jumps(tmp_path):
    """Why `output_scale: none` exists: 1/p was for random draws."""
    scaled = NESTED | {"output_scale": "inverse_rate"}
    assert min(drops(tmp_path, "tiny-llama", scaled)) < -TOLERANCE
