"""FP8 training does not depend on the layout, resumes exactly, and goes through subnets without a jump."""

from pathlib import Path

import pytest

from megatron_tlt.models.fp8_linear import Fp8Quantizer
from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.controller import EstSubnets
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from megatron_tlt.subnet.spec import est_layer_spec
from megatron_tlt.subnet.stats import StepOutcome
from megatron_tlt.train.checkpoint import TrainState, load_checkpoint, save_checkpoint
from megatron_tlt.train.optimizer import OptimizerConfig, build_optimizer, wrap_data_parallel
from megatron_tlt.train.step import attach_finalizer, train_step
from tests.dist.runs import DISTRIBUTED, OVERLAPPED, PP2, SP2, TP2, steps
from tests.dist.runs import train as pretrain
from tests.dist.workers import run_distributed

import torch

VOCAB, SEQ, BATCH, STEPS = 96, 64, 4, 8
SHAPE = dict(preset="tiny-llama", num_layers=4, hidden_size=128, ffn_hidden_size=256, seq_length=SEQ,
             num_attention_heads=8, num_query_groups=2, kv_channels=32)  # fmt: skip
ENDS = [3, 6]
EST = {"schedule": "practical", "ends": ENDS, "ends_in": "steps", "tp_strata": 2, "pp_strata": 2,
       "mlp_align": 32}  # fmt: skip
DELAYED = {"fp8": "hybrid", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}


class Run:
    """A small FP8 run on this rank, with subnets where `est` is given."""

    def __init__(self, sections: dict) -> None:
        torch.set_num_threads(1)
        self.parallel = init_parallel(ParallelConfig(**sections.get("parallel", {})), seed=1)
        model = ModelConfig(**(SHAPE | sections.get("model", {})))
        self.bare = build_chunks(
            model, self.parallel, vocab_size=VOCAB, layer_spec=est_layer_spec,
            params_dtype=sections.get("dtype", torch.float32),
            precision=PrecisionConfig(**sections["precision"]),
        )  # fmt: skip
        initialize_parameters(self.bare, seed=1, vocab_size=VOCAB)
        config = OptimizerConfig(lr=1e-3, **sections.get("optimizer", {}))
        self.chunks = wrap_data_parallel(self.bare, config, self.parallel)
        attach_finalizer(self.chunks, self.parallel)
        self.optimizer = build_optimizer(self.chunks, config, self.parallel)
        est = EstConfig(**(EST | sections["est"])) if "est" in sections else EstConfig()
        schedule = build_schedule(
            est, ModelShape.of(model, padded_vocab_size=128), train_iters=STEPS, seed=7,
            tokens_after=lambda n: n * BATCH * SEQ,
        )  # fmt: skip
        self.subnets = EstSubnets(schedule, self.parallel)
        self.subnets.attach(self.chunks, self.optimizer)

    def step(self, number: int) -> tuple[float, float]:
        data = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(number))
        data = data % 7 * 3 + torch.arange(SEQ + 1) % 5
        mine = data.chunk(self.parallel.dp_size)[self.parallel.dp_rank]
        batches = [
            {"tokens": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous(),
             "loss_mask": torch.ones(len(x), SEQ), "position_ids": torch.arange(SEQ).expand(len(x), -1)}
            for x in mine.split(2)
        ]  # fmt: skip
        self.subnets.begin_step(number)
        result = train_step(self.chunks, self.optimizer, batches, parallel=self.parallel)
        self.subnets.end_step(
            StepOutcome(loss=result.loss, grad_norm=result.grad_norm, clip_grad=1.0,
                        tokens=BATCH * SEQ, seconds=1.0)
        )  # fmt: skip
        return result.loss, result.grad_norm

    def scales(self) -> list[list[float]]:
        """Of every layer: those of input, weight and gradient."""
        quantizers = (m for c in self.bare for m in c.modules() if isinstance(m, Fp8Quantizer))
        return [q.scale.tolist() for q in quantizers]


def train(sections: dict) -> list[tuple[float, float]]:
    run = Run(sections)
    return [run.step(number) for number in range(STEPS)]


def on_world(world_size: int, sections: dict, task=train, *args: object) -> list:
    """The result of every rank; of `train`, which all ranks must agree on, that of the first."""
    if world_size == 1:
        results = [task(sections, *args)]
    else:
        results = run_distributed(task, world_size, sections, *args)
    if task is not train:
        return results
    assert all(result == results[0] for result in results)
    return results[0]


LAYOUTS = {
    "TP2": (2, {"parallel": TP2}),
    "TP2+SP": (2, {"parallel": SP2}),
    "PP2": (2, {"parallel": PP2}),
    "DP2 distributed optimizer, overlapped": (2, {"optimizer": OVERLAPPED}),
    "full recompute": (1, {"model": {"recompute_granularity": "full"}}),
    "selective recompute, TP2+SP": (
        2, {"parallel": SP2, "model": {"recompute_granularity": "selective",
                                       "recompute_modules": ["layernorm", "mlp"]}},
    ),
}  # fmt: skip


def assert_close(ours: list, expected: list, *, loss: float, norm: float) -> None:
    """Losses in nats, gradient norms relative to their size."""
    for (mine, mine_norm), (wanted, wanted_norm) in zip(ours, expected, strict=True):
        assert mine == pytest.approx(wanted, abs=loss, rel=0)
        assert mine_norm == pytest.approx(wanted_norm, rel=norm)


CASES = {
    "delayed": ({"precision": DELAYED}, ["TP2", "full recompute"]),
    "delayed, subnets": ({"precision": DELAYED, "est": {}}, list(LAYOUTS)[1:]),
    "mxfp8, subnets": ({"precision": MXFP8, "est": {}}, ["TP2+SP"]),
}


@pytest.mark.parametrize("case", CASES)
def test_recipes_whose_scales_know_no_layout_give_one_run_on_all(case):
    """Sums in another order move a value across a rounding step now and then, no more."""
    sections, layouts = CASES[case]
    expected = on_world(1, sections)
    assert expected[-1][0] < expected[0][0] - 0.3
    for name in layouts:
        world_size, layout = LAYOUTS[name]
        assert_close(on_world(world_size, sections | layout), expected, loss=2e-3, norm=0.02)


def test_tensorwise_scales_of_a_rank_are_its_own_as_in_transformer_engine():
    """Each TP rank scales its part of a weight by itself; the runs differ by less than half a percent."""
    expected = on_world(1, {"precision": TENSORWISE})
    ours = on_world(2, {"precision": TENSORWISE, "parallel": SP2})
    assert_close(ours, expected, loss=0.005 * expected[0][0], norm=0.1)
    assert ours != expected


def test_first_and_last_layers_stay_out_of_fp8_on_every_layout():
    precision = TENSORWISE | {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}
    for sections in ({}, {"parallel": PP2}):
        world_size = 2 if sections else 1
        counts = on_world(world_size, sections | {"precision": precision}, count_fp8)
        assert sum(counts) == 4  # the linears of one layer of four
    plain = on_world(1, {"precision": precision})
    assert_close(
        on_world(2, {"precision": precision, "parallel": PP2}), plain, loss=1e-3, norm=0.01
    )


def count_fp8(sections: dict) -> int:
    modules = (m for chunk in Run(sections).bare for m in chunk.modules())
    return sum(isinstance(m, Fp8Quantizer) for m in modules)


def scales_of(sections: dict) -> list:
    run = Run(sections)
    for number in range(3):
        run.step(number)
    return run.scales()


def test_all_ranks_that_share_a_layer_have_its_scales():
    for layout in (SP2, {}):
        first, second = on_world(2, {"precision": DELAYED, "parallel": layout}, scales_of)
        assert first == second
        assert all(scale not in (1.0, 0.0) for layer in first for scale in layer)


def resumed(sections: dict, folder: str, first: int) -> tuple[list, list]:
    """Save after `first` steps; then the losses of the next ones, here and in a fresh run that loads."""
    run = Run(sections)
    for number in range(first):
        run.step(number)
    groups = run.parallel.groups
    save_checkpoint(folder, TrainState(iteration=first), run.bare, run.optimizer, groups=groups)
    scales = run.scales()
    whole = [run.step(number) for number in range(first, STEPS)]
    fresh = Run(sections)  # ends the groups of the first
    path = next(Path(folder).glob("iter_*"))
    load_checkpoint(path, fresh.bare, fresh.optimizer, groups=fresh.parallel.groups)
    assert fresh.scales() == scales
    return whole, [fresh.step(number) for number in range(first, STEPS)]


@pytest.mark.parametrize("layout", [{}, {"parallel": SP2, "optimizer": DISTRIBUTED}], ids=["one", "TP2"])
def test_a_resumed_run_goes_on_exactly(tmp_path, layout):
    """Across a stage end of the subnets; history and scales come from the checkpoint."""
    sections = {"precision": DELAYED, "est": {}} | layout
    for whole, again in on_world(2 if layout else 1, sections, resumed, str(tmp_path), 4):
        assert whole == again


def loaded_scales(sections: dict, folder: str) -> list:
    run = Run(sections)
    path = next(Path(folder).glob("iter_*"))
    load_checkpoint(path, run.bare, None, groups=run.parallel.groups)
    return run.scales()


def test_scales_load_under_another_layout(tmp_path):
    sections = {"precision": DELAYED}
    on_world(1, sections, resumed, str(tmp_path), 3)
    (alone,) = on_world(1, sections, loaded_scales, str(tmp_path))
    for scales in on_world(2, sections | {"parallel": TP2}, loaded_scales, str(tmp_path)):
        assert scales == alone
    first, second = on_world(2, sections | {"parallel": PP2}, loaded_scales, str(tmp_path))
    assert first + second == alone


def saved(sections: dict, folder: str) -> None:
    run = Run(sections)
    for number in range(2):
        run.step(number)
    groups = run.parallel.groups
    save_checkpoint(folder, TrainState(iteration=2), run.bare, None, groups=groups)


def test_a_run_may_change_its_precision_or_window_when_it_resumes(tmp_path, capfd):
    plain, delayed = str(tmp_path / "plain"), str(tmp_path / "delayed")
    saved({"precision": {}}, plain)
    assert all(scale == [1.0] * 3 for scale in loaded_scales({"precision": DELAYED}, plain))
    assert "lacks 8 tensors of FP8 scaling state" in capfd.readouterr().err
    saved({"precision": DELAYED}, delayed)
    assert loaded_scales({"precision": {}}, delayed) == []
    scales = loaded_scales({"precision": DELAYED | {"fp8_amax_history_len": 2}}, delayed)
    assert scales == loaded_scales({"precision": DELAYED}, delayed)
    assert "lacks 4 tensors of FP8 scaling state" in capfd.readouterr().err


def test_the_pretraining_loop_resumes_fp8_subnets_exactly(tmp_path):
    """The whole path from the configuration, saved in the middle of a stage."""
    sections = {
        "precision": DELAYED, "parallel": SP2, "est": {"schedule": "practical", "ends": ["1/3", "2/3"]},
        "checkpoint": {"save": str(tmp_path / "save"), "save_interval": 3},
    }  # fmt: skip
    run_distributed(pretrain, 2, tmp_path / "whole", "tiny-llama", sections)
    resumed_sections = sections | {"checkpoint": {"load": str(tmp_path / "save"), "ckpt_step": 3}}
    run_distributed(pretrain, 2, tmp_path / "resumed", "tiny-llama", resumed_sections)
    whole, again = steps(tmp_path / "whole"), steps(tmp_path / "resumed")
    assert len(whole) == 6 and whole[3:] == again


def test_growth_brings_no_jump_of_loss_or_scales():
    """Beside the same subnets without FP8; a scale moves by the change of what it measures, at most the 1 / p
    of the gradients, and with a window of 4 steps it moves late."""
    plain = on_world(1, {"precision": {}, "est": {}})
    for precision in (DELAYED, TENSORWISE, MXFP8):
        run = Run({"precision": precision, "est": {}})
        losses, scales = [], []
        for number in range(STEPS):
            losses.append(run.step(number))
            scales.append(torch.tensor(run.scales()) if precision is DELAYED else None)
        for (ours, _), (exact, _) in zip(losses, plain, strict=True):
            assert ours == pytest.approx(exact, rel=0.01)
        for end in ENDS if precision is DELAYED else ():
            met = scales[end - 1] != 1.0
            ratio = (scales[end] / scales[end - 1])[met]
            assert met.any() and ratio.max() < 4.0 and ratio.min() > 0.25


def test_layers_that_do_not_run_keep_their_scales():
    run = Run({"precision": DELAYED, "est": {"ends": [8, 8]}})
    run.step(0)
    for number in range(1, 4):
        before = run.scales()
        run.step(number)
        after, plan = run.scales(), run.subnets.plan.layers
        for layer in range(4):
            kept = before[4 * layer : 4 * layer + 4] == after[4 * layer : 4 * layer + 4]
            assert kept == (plan[layer] is None)
