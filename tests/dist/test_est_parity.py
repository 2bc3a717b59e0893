"""Subnet training does not depend on the layout: 30 steps over two stage ends equal one process's."""

import pytest

from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import global_parameters, initialize_parameters
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.controller import EstSubnets
from megatron_tlt.subnet.flops import rank_flops
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from megatron_tlt.subnet.spec import est_layer_spec
from megatron_tlt.subnet.stats import StepOutcome
from megatron_tlt.train.optimizer import (
    OptimizerConfig, build_optimizer, gathered_parameters, wrap_data_parallel,
)  # fmt: skip
from megatron_tlt.train.step import attach_finalizer, evaluate, train_step
from tests.dist.runs import DISTRIBUTED, OVERLAPPED, PP2, SP2, TP2, VPP2
from tests.dist.workers import run_distributed

import torch

VOCAB, SEQ, BATCH, STEPS, FEW = 96, 32, 4, 30, 9
EST = {"schedule": "practical", "ends": [10, 20], "ends_in": "steps", "tp_strata": 2, "pp_strata": 4,
       "digest_interval": 7}  # fmt: skip
SHAPES = ["tiny-gpt2", "tiny-llama"]
LAYOUTS = {
    "TP2": (2, {"parallel": TP2}),
    "TP2xPP2": (4, {"parallel": TP2 | PP2}),
    "TP2xPP2xVPP2+SP": (4, {"parallel": SP2 | VPP2}),
    "DP2 distributed optimizer, overlapped": (2, {"optimizer": OVERLAPPED}),
    "full recompute": (1, {"model": {"recompute_granularity": "full"}}),
}
# Of the second shape and over fewer steps.
OPTIONS = {
    "PP2xVPP2": (2, {"parallel": VPP2}),
    "DP2xPP2xVPP2 distributed optimizer, overlapped": (4, {"parallel": VPP2, "optimizer": OVERLAPPED}),
    "TP2+SP, selective recompute": (
        2, {"parallel": SP2, "model": {"recompute_granularity": "selective",
                                       "recompute_modules": ["core_attn", "mlp"]}},
    ),
    "frozen, DP2": (2, {"est": {"idle_params": "frozen"}}),
    "frozen, nested, DP2 overlapped": (
        2, {"est": {"idle_params": "frozen", "draw": "nested"}, "optimizer": OVERLAPPED},
    ),
    "whole groups, rotating, TP2": (
        2, {"est": {"gqa_unit": "groups", "draw": "rotating"}, "parallel": TP2,
            "model": {"num_attention_heads": 8, "num_query_groups": 4}},
    ),
    "linear ramp, TP2+SP": (2, {"est": {"growth": "linear", "resample_interval": 3},
                                "parallel": SP2}),
    "antithetic, layer scale, PP2": (2, {"est": {"antithetic": True, "layer_scale": "inverse_rate"},
                                         "parallel": PP2}),
}  # fmt: skip


class Run:
    """A small training run on this rank."""

    def __init__(self, preset: str, sections: dict) -> None:
        torch.set_num_threads(1)
        self.parallel = init_parallel(ParallelConfig(**sections.get("parallel", {})), seed=1)
        shape = {"num_layers": 8, "seq_length": SEQ} | sections.get("model", {})
        model = ModelConfig(preset=preset, **shape)
        dtype = sections.get("dtype", torch.float32)
        self.bare = build_chunks(
            model, self.parallel, vocab_size=VOCAB, params_dtype=dtype, layer_spec=est_layer_spec
        )
        initialize_parameters(self.bare, seed=1, vocab_size=VOCAB)
        config = OptimizerConfig(lr=1e-3, **({"clip_grad": 1.0} | sections.get("optimizer", {})))
        self.chunks = wrap_data_parallel(self.bare, config, self.parallel)
        attach_finalizer(self.chunks, self.parallel)
        self.optimizer = build_optimizer(self.chunks, config, self.parallel)
        schedule = build_schedule(
            EstConfig(**(EST | sections.get("est", {}))),
            ModelShape.of(model, padded_vocab_size=128),
            train_iters=100,
            seed=7,
            tokens_after=lambda n: n * BATCH * SEQ,
        )
        self.subnets = EstSubnets(schedule, self.parallel)
        self.subnets.attach(self.chunks, self.optimizer)

    def batches(self, step: int) -> list[dict]:
        data = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
        data = data % 7 * 3 + torch.arange(SEQ + 1) % 5
        mine = data.chunk(self.parallel.dp_size)[self.parallel.dp_rank]
        positions = torch.arange(SEQ)[None]
        return [
            {"tokens": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous(),
             "loss_mask": torch.ones(len(x), SEQ), "position_ids": positions.expand(len(x), -1)}
            for x in mine.split(2 if self.parallel.dp_size == 1 else 1)
        ]  # fmt: skip

    def step(self, number: int) -> tuple[float, float]:
        self.subnets.begin_step(number)
        result = train_step(
            self.chunks, self.optimizer, self.batches(number), parallel=self.parallel
        )
        self.subnets.end_step(
            StepOutcome(loss=result.loss, grad_norm=result.grad_norm, clip_grad=1.0,
                        tokens=BATCH * SEQ, seconds=1.0)
        )  # fmt: skip
        return result.loss, result.grad_norm

    def full_loss(self) -> float:
        batches = self.batches(99)
        with self.subnets.full_model(), gathered_parameters(self.chunks):
            loss, _ = evaluate(
                self.chunks, iter(batches), num_microbatches=len(batches), parallel=self.parallel
            )
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        with gathered_parameters(self.chunks):
            return {n: p.detach().clone() for c in self.bare for n, p in global_parameters(c)}


def train(preset: str, sections: dict, steps: int = STEPS) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, and the full model's loss after the second and the last."""
    run, out = Run(preset, sections), []
    for number in range(steps):
        out.append(run.step(number))
        if number in (1, steps - 1):
            out.append((run.full_loss(), 0.0))
    assert_equal_work(run, steps)
    return out


def assert_equal_work(run: Run, steps: int) -> None:
    """No TP rank or pipeline chunk had more to do than another in any step."""
    config = run.parallel.config
    chunks = config.pipeline_model_parallel_size * config.num_model_chunks
    for number in range(steps):
        plan = run.subnets.begin_step(number)
        ranks = rank_flops(
            run.subnets.schedule, plan, tensor=config.tensor_model_parallel_size, chunks=chunks
        )
        values = [rank.total for chunk in ranks for rank in chunk]
        assert max(values) == min(values) > 0


def on_world(world_size: int, *args: object) -> list:
    if world_size == 1:
        return train(*args)
    results = run_distributed(train, world_size, *args)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module", params=SHAPES)
def reference(request):
    return request.param, train(request.param, {})


def assert_equal_runs(ours: list, expected: list) -> None:
    """Losses to 1e-5 nats; gradient norms, which spike while subnets change, to 1e-4 of their size."""
    assert len(ours) == len(expected) > 0
    for (loss, norm), (wanted_loss, wanted_norm) in zip(ours, expected):
        assert loss == pytest.approx(wanted_loss, abs=1e-5, rel=0)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_equal_one_process(layout, reference):
    preset, expected = reference
    world_size, sections = LAYOUTS[layout]
    ours = on_world(world_size, preset, sections)
    assert len(ours) == STEPS + 2
    assert_equal_runs(ours, expected)
    assert ours[-1][0] < ours[0][0] - 0.5  # it learns


@pytest.mark.parametrize("option", OPTIONS)
def test_options_do_not_depend_on_the_layout(option):
    world_size, sections = OPTIONS[option]
    est = {"ends": [3, 6]} | sections.get("est", {})
    alone = {name: section for name, section in sections.items() if name == "model"} | {"est": est}
    expected = train("tiny-llama", alone, FEW)
    ours = on_world(world_size, "tiny-llama", sections | {"est": est}, FEW)
    assert_equal_runs(ours, expected)


def test_bf16_is_within_one_percent_of_fp32():
    est = {"ends": [3, 6]}
    expected = train("tiny-llama", {"est": est}, FEW)
    sections = {"dtype": torch.bfloat16, "optimizer": OVERLAPPED, "est": est}
    ours = on_world(2, "tiny-llama", sections, FEW)
    for (loss, _), (wanted, _) in zip(ours, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=0.01)


def different_seeds() -> str:
    run = Run("tiny-gpt2", {"est": {"seed": int(torch.distributed.get_rank())}})
    try:
        run.subnets.begin_step(0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_train_different_subnets_are_found_out():
    for message in run_distributed(different_seeds, 2):
        assert "iteration 0: ranks train different subnets" in message


def test_a_layout_that_would_be_uneven_is_refused():
    sections = {"est": {"pp_strata": 1}, "parallel": PP2}
    messages = run_distributed(refusal, 2, sections)
    assert all("est.pp_strata=1 is not a multiple of pipeline" in message for message in messages)
    dropping = {"est": {"schedule": "layer_drop", "ends": [], "order": []}, "parallel": PP2}
    assert all("unequal work" in message for message in run_distributed(refusal, 2, dropping))


def refusal(sections: dict) -> str:
    try:
        Run("tiny-gpt2", sections)
    except ValueError as error:
        return str(error)
    return ""


def idle_movement(sections: dict) -> dict[str, float]:
    """Largest change of weights outside and inside the subnet after two nested steps with weight decay."""
    run = Run("tiny-gpt2", sections | {"est": sections["est"] | {"draw": "nested"}})
    before = run.weights()
    for number in (0, 1):
        plan = run.subnets.begin_step(number)
        run.step(number)
    after, moved = run.weights(), {"idle": 0.0, "skipped": 0.0, "active": 0.0}
    f = run.bare[0].config.ffn_hidden_size
    for layer in plan.layers:
        for number, name in [(layer.layer, "linear_fc1.weight")] if layer else []:
            key = f"decoder.layers.{number}.mlp.{name}"
            change = (after[key] - before[key]).abs().view(f // 16, -1)
            kept = torch.zeros(f // 16, dtype=torch.bool)
            kept[list(layer.mlp)] = True
            moved["idle"] = max(moved["idle"], change[~kept].max().item())
            moved["active"] = max(moved["active"], change[kept].max().item())
    for number, layer in enumerate(plan.layers):
        if layer is None:
            for name in before:
                if name.startswith(f"decoder.layers.{number}."):
                    change = (after[name] - before[name]).abs().max().item()
                    moved["skipped"] = max(moved["skipped"], change)
    return moved


@pytest.mark.parametrize("optimizer", [{}, DISTRIBUTED, OVERLAPPED], ids=["plain", "distributed", "overlapped"])
def test_idle_weights_move_with_zero_grad_and_rest_when_frozen(optimizer):
    for policy in ("zero_grad", "frozen"):
        sections = {"est": {"idle_params": policy}, "optimizer": optimizer}
        world_size = 2 if optimizer else 1
        moved = run_distributed(idle_movement, world_size, sections)[0]
        assert moved["active"] > 1e-4
        decayed = [moved["idle"] > 0.0, moved["skipped"] > 0.0]
        assert decayed == ([True, True] if policy == "zero_grad" else [False, False])


def resumed_plans(run: Run, first: int) -> list[int]:
    return [run.subnets.begin_step(number).digest() for number in range(first, STEPS)]


def stepped(steps: int, **est: object) -> Run:
    """A run after so many steps; it ends the groups of the one before, which can make no further step."""
    run = Run("tiny-gpt2", {"est": est})
    for number in range(steps):
        run.step(number)
    return run


def test_plans_and_meters_resume_in_the_middle_of_a_stage():
    whole, part = stepped(8), stepped(5)
    resumed = Run("tiny-gpt2", {})
    resumed.subnets.load_state_dict(part.subnets.state_dict())
    for number in range(5, 8):
        resumed.step(number)
    assert resumed.subnets.meter.saving() == whole.subnets.meter.saving()
    assert resumed.subnets.coverage.summary("mlp") == whole.subnets.coverage.summary("mlp")
    ours, theirs = resumed.subnets.metrics(), whole.subnets.metrics()
    weights = {"est-grad-norm", "est-clip-fraction"}  # of the weights, which are not carried over here
    assert {k: v for k, v in ours.items() if k not in weights} == {
        k: v for k, v in theirs.items() if k not in weights
    }
    assert resumed_plans(resumed, 8) == resumed_plans(whole, 8)


def test_a_checkpoint_of_other_subnets_is_refused():
    state = Run("tiny-gpt2", {}).subnets.state_dict()
    other = Run("tiny-gpt2", {"est": {"draw": "nested"}})
    with pytest.raises(ValueError, match="draw was 'random', is 'nested'"):
        other.subnets.load_state_dict(state)


def test_an_adaptive_run_grows_and_resumes_its_decisions():
    est = {"schedule": "adaptive", "adaptive_window": 2, "adaptive_min_gain": 10.0}
    whole, part = stepped(10, **est), stepped(6, **est)
    assert [stage.start for stage in part.subnets.schedule.stages] == [0, 4, 20]
    resumed = Run("tiny-gpt2", {"est": est})
    resumed.subnets.load_state_dict(part.subnets.state_dict())
    for number in range(6, 10):
        resumed.step(number)
    assert resumed.subnets.schedule.stages == whole.subnets.schedule.stages
    assert [stage.start for stage in whole.subnets.schedule.stages] == [0, 4, 8]


def test_the_loss_falls_at_growth_and_never_jumps():
    """A subnet's loss carries its own noise, which disappears when it grows; a jump up would be a wrong scale."""
    for preset in SHAPES:
        losses = [loss for loss, _ in train(preset, {"est": {"resample_interval": "stage"}})]
        losses = losses[:2] + losses[3:]  # without the evaluation
        for boundary in (10, 20):
            before = sum(losses[boundary - 3 : boundary]) / 3
            assert losses[boundary] < before + 0.05


def test_stage_statistics_name_what_happened():
    run = Run("tiny-gpt2", {})
    for number in range(22):
        run.step(number)
    rows = run.subnets.stats.rows(run.subnets.schedule)
    assert [row["steps"] for row in rows] == [10, 10, 2]
    assert rows[0]["predicted"] < rows[1]["predicted"] < rows[2]["predicted"] == 1.0
    assert all(row["measured"] == 1.0 and row["grad_norm"] > 0.0 for row in rows)
