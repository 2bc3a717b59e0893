"""Subnet plans: exact counts, balance, independence of layout, growth, refusals, and the FLOPs they save."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.subnet.adaptive import AdaptiveGrower
from megatron_tlt.subnet.config import EstConfig, StageConfig
from megatron_tlt.subnet.coverage import Coverage
from megatron_tlt.subnet.draw import draw_plan, evenly_spaced
from megatron_tlt.subnet.flops import (
    FlopsMeter, dense_flops, describe_stages, plan_flops, predicted_saving, rank_flops, stage_flops,
)  # fmt: skip
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from megatron_tlt.train.estimate import flops_per_token

GPT2 = ModelShape.of(ModelConfig(preset="gpt2-124m"), padded_vocab_size=50257)
TINYLLAMA = ModelShape.of(ModelConfig(preset="tinyllama-1.1b"), padded_vocab_size=32000)
SMALL = ModelShape.of(ModelConfig(preset="tiny-gpt2", num_layers=8), padded_vocab_size=384)
SMALL_GQA = ModelShape.of(ModelConfig(preset="tiny-llama", num_layers=8), padded_vocab_size=384)


def schedule_of(shape=SMALL, *, train_iters=150, seed=1, **options):
    options = {"schedule": "practical"} | options
    return build_schedule(
        EstConfig(**options), shape, train_iters=train_iters, seed=seed, tokens_after=lambda n: 10 * n
    )


@pytest.mark.parametrize(
    ("shape", "ends", "train_iters", "gqa_unit", "layers_only", "in_all"),
    [
        # The paper's savings, and schedules that fit them: shared arithmetic 0.75 a + 0.5 b.
        (GPT2, [20_000, 70_000], 150_000, "heads", 4 / 15, 0.189),
        (TINYLLAMA, [10_000, 25_000], 60_000, "groups", 0.25, 0.236),
        (TINYLLAMA, [10_000, 40_000], 90_000, "groups", 0.25, 0.235),
        (TINYLLAMA, [10_000, 25_000], 60_000, "heads", 0.2464, 0.232),
    ],
)
def test_published_savings(shape, ends, train_iters, gqa_unit, layers_only, in_all):
    schedule = schedule_of(
        shape, ends=ends, ends_in="steps", train_iters=train_iters, gqa_unit=gqa_unit
    )
    saving = predicted_saving(schedule, tokens_after=lambda n: n)
    exact = gqa_unit == "groups" or shape is GPT2
    assert saving.layers == pytest.approx(layers_only, abs=1e-9 if exact else 5e-5)
    assert saving.total == pytest.approx(in_all, abs=1e-3)


@pytest.mark.parametrize("preset", ["gpt2-124m", "tinyllama-1.1b", "tiny-llama"])
def test_dense_flops_are_those_of_the_training_estimate(preset):
    model = ModelConfig(preset=preset)
    shape = ModelShape.of(model, padded_vocab_size=50304)
    expected = flops_per_token(model, padded_vocab_size=50304)
    assert dense_flops(shape).total == pytest.approx(expected, rel=1e-12)
    plan = draw_plan(schedule_of(shape, schedule="dense"), 0)
    assert plan.is_full and plan_flops(schedule_of(shape), plan).total == pytest.approx(expected)


@pytest.mark.parametrize("draw", ["random", "nested", "window", "rotating"])
@pytest.mark.parametrize("gqa_unit", ["heads", "groups"])
@pytest.mark.parametrize("shape", [SMALL, SMALL_GQA, GPT2, TINYLLAMA])
def test_every_rank_and_stage_gets_the_same_work(shape, gqa_unit, draw):
    schedule = schedule_of(shape, gqa_unit=gqa_unit, draw=draw)
    pools = schedule.pools
    assert schedule.is_balanced
    for step in (0, 7, 19, 20, 45, 69, 70):
        plan = draw_plan(schedule, step)
        expected = stage_flops(schedule, schedule.stages[plan.stage])
        assert plan_flops(schedule, plan).total == pytest.approx(expected.total)
        for tensor in [t for t in (1, 2, 4) if pools.tp_strata % t == 0]:
            for chunks in [c for c in (1, 2, 4) if pools.pp_strata % c == 0]:
                ranks = rank_flops(schedule, plan, tensor=tensor, chunks=chunks)
                values = [rank.total for chunk in ranks for rank in chunk]
                assert max(values) == pytest.approx(min(values))
                assert sum(values) == pytest.approx(expected.layers)


def test_plans_are_a_function_of_the_step_alone():
    schedule = schedule_of()
    forward = [draw_plan(schedule, step).digest() for step in range(100)]
    again = schedule_of()
    assert [draw_plan(again, step).digest() for step in reversed(range(100))] == forward[::-1]
    assert len(set(forward[:70])) == 70 and len(set(forward[70:])) == 1
    assert draw_plan(schedule_of(seed=2), 3).digest() != forward[3]


def test_first_draw_is_pinned_so_that_a_changed_hash_is_noticed():
    """Expected values: SHAKE-128 of "1/1/0/0/heads/<stratum>" as little-endian 64-bit keys, sorted; by hand
    with hashlib in the Python shell."""
    import hashlib

    schedule = schedule_of(GPT2, layers=1, order=["heads+mlp"], ends=["1/2"])
    expected = []
    for stratum in range(schedule.pools.tp_strata):
        raw = hashlib.shake_128(f"1/1/0/0/heads/{stratum}".encode()).digest(48)
        keys = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(6)]
        expected += sorted(6 * stratum + i for i in sorted(range(6), key=keys.__getitem__)[:3])
    assert draw_plan(schedule, 0).layers[0].heads == tuple(expected)


def test_draws_are_uniform_and_independent_between_layers():
    schedule = schedule_of(layers=1, order=["heads+mlp"], ends=[1])
    counts, together = [0] * 4, 0
    for step in range(500):
        layers = draw_plan(replace(schedule, stages=schedule.stages[:1]), step).layers
        for unit in layers[0].heads:
            counts[unit] += 1
        together += layers[0].heads == layers[1].heads
    assert all(abs(count - 250) < 4 * 125**0.5 for count in counts)
    assert abs(together - 125) < 4 * 94**0.5  # 2 of 4 heads in two strata of two: 4 equal outcomes


def test_outputs_are_scaled_by_what_is_kept_or_left():
    for output_scale, factor in (("inverse_rate", 2.0), ("none", 1.0)):
        layers = draw_plan(schedule_of(output_scale=output_scale), 0).layers
        assert {(x.head_scale, x.mlp_scale) for x in layers if x is not None} == {(factor, factor)}


def test_resample_interval_keeps_a_subnet():
    digests = [draw_plan(schedule_of(resample_interval=5), step).digest() for step in range(20)]
    assert [len(set(digests[i : i + 5])) for i in range(0, 20, 5)] == [1] * 4
    assert len(set(digests)) == 4
    by_stage = schedule_of(resample_interval="stage")
    assert len({draw_plan(by_stage, step).digest() for step in range(100)}) == 3


def test_antithetic_pairs_train_every_weight_once():
    schedule = schedule_of(antithetic=True, layers=1, order=["heads+mlp"], ends=["1/2"])
    for step in range(0, 20, 2):
        one, other = draw_plan(schedule, step).layers[3], draw_plan(schedule, step + 1).layers[3]
        assert sorted(one.heads + other.heads) == list(range(4))
        assert sorted(one.mlp + other.mlp) == list(range(16))


def test_shared_draws_are_the_same_in_all_layers():
    layers = draw_plan(schedule_of(shared_draws=True), 30).layers
    assert len({(layer.heads, layer.mlp) for layer in layers}) == 1


@pytest.mark.parametrize("draw", ["random", "nested"])
def test_a_persistent_subnet_only_grows(draw):
    schedule = schedule_of(GPT2, draw=draw, resample_interval="never", growth="linear")
    assert len(schedule.stages) > 10
    plans = [draw_plan(schedule, stage.start) for stage in schedule.stages]
    for before, after in pairwise(plans):
        for a, b in zip(before.layers, after.layers):
            if a is not None:
                assert b is not None
                assert b.heads is None or set(a.heads) <= set(b.heads)
                assert b.mlp is None or set(a.mlp) <= set(b.mlp)


def test_nested_layers_are_evenly_spaced():
    assert evenly_spaced(12, 4)[:4] == [0, 3, 6, 9]
    for size in range(1, 25):
        for smallest in range(1, size + 1):
            assert sorted(evenly_spaced(size, smallest)) == list(range(size))
    plan = draw_plan(schedule_of(GPT2, draw="nested", pp_strata=1), 0)
    assert [layer.layer for layer in plan.layers if layer] == [0, 2, 4, 6, 8, 10]


def test_protected_layers_always_run():
    schedule = schedule_of(GPT2, protect_first_layer=True, protect_last_layer=True)
    for step in range(20):
        layers = draw_plan(schedule, step).layers
        assert layers[0] is not None and layers[-1] is not None
        assert sum(layer is not None for layer in layers) == 6


def test_scales_are_the_inverse_of_the_effective_rates():
    layer = next(x for x in draw_plan(schedule_of(mlp="3/4", heads="1/2"), 0).layers if x)
    assert (layer.head_scale, layer.mlp_scale, layer.bias_scale) == (2.0, 4 / 3, 1.0)
    layers = draw_plan(schedule_of(layers="3/4", layer_scale="inverse_rate", pp_strata=2), 0).layers
    kept = [x for x in layers if x]
    assert len(kept) == 6 and {x.bias_scale for x in kept} == {4 / 3}
    assert {x.head_scale for x in kept} == {4 / 3 * 2}


def test_bernoulli_draws_vary_in_count_around_the_rate():
    schedule = schedule_of(GPT2, draw="bernoulli", layers=1, order=["heads+mlp"], ends=[1])
    counts = [len(x.heads) for step in range(100) for x in draw_plan(schedule, step).layers]
    assert len(set(counts)) > 3 and sum(counts) / len(counts) == pytest.approx(6.0, abs=0.3)
    assert not schedule.is_balanced


def test_ends_in_steps_tokens_and_fractions_agree():
    wanted = [(0, 20), (20, 70), (70, None)]
    for unit, ends in (
        ("fraction", ["2/15", "7/15"]), ("steps", [20, 70]), ("tokens", [200, 691]),
    ):  # fmt: skip
        stages = schedule_of(ends=ends, ends_in=unit).stages
        assert [(stage.start, stage.end) for stage in stages] == wanted


def test_other_orders_of_growth():
    stages = schedule_of(order=["mlp", "heads", "layers"], ends=["1/4", "1/2", "3/4"]).stages
    assert [stage.describe() for stage in stages] == [
        "layers 1/2 heads 1/2 mlp 1/2", "layers 1/2 heads 1/2 mlp 1", "layers 1/2 heads 1 mlp 1",
        "layers 1 heads 1 mlp 1",
    ]  # fmt: skip


@pytest.mark.parametrize("growth", ["linear", "cosine"])
def test_ramps_rise_in_legal_counts_and_end_at_the_end(growth):
    schedule = schedule_of(GPT2, growth=growth, train_iters=1500)
    rates = [(stage.layers, stage.heads[0], stage.mlp[0]) for stage in schedule.stages]
    assert rates[0] == (Fraction(1, 2),) * 3 and rates[-1] == (1, 1, 1)
    assert all(a <= b for one, other in pairwise(rates) for a, b in zip(one, other))
    assert schedule.stages[-1].start <= 700
    step = schedule_of(GPT2, train_iters=1500)
    tokens = lambda n: n  # noqa: E731
    ramp_saving = predicted_saving(schedule, tokens_after=tokens).layers
    assert 0.0 < ramp_saving < predicted_saving(step, tokens_after=tokens).layers


def test_listed_stages_with_rates_per_layer():
    pattern = ["1/4", "1/2", "3/4", 1]
    schedule = schedule_of(
        schedule="stages", pp_strata=2, stages=[StageConfig(until="1/2", mlp=pattern * 2)]
    )
    sizes = [None if x.mlp is None else len(x.mlp) for x in draw_plan(schedule, 0).layers]
    assert sizes == [4, 8, 12, None] * 2
    ranks = rank_flops(schedule, draw_plan(schedule, 0), tensor=2, chunks=2)
    assert len({rank.total for chunk in ranks for rank in chunk}) == 1


@pytest.mark.parametrize(
    ("name", "saving"), [("dense", 0.0), ("layer_drop", 0.2), ("depth_staged", 2 / 15 / 2),
                         ("fixed_then_full", 7 / 15 * 0.75)],
)  # fmt: skip
def test_baselines_save_what_their_papers_arithmetic_says(name, saving):
    schedule = schedule_of(GPT2, schedule=name)
    assert predicted_saving(schedule, tokens_after=lambda n: n).layers == pytest.approx(saving)


def test_progressive_layer_drop_follows_its_formula():
    """theta(t) = (1 - 0.5) exp(-0.001 t) + 0.5; at t = 0 nothing is dropped, late the mean layer keeps
    1 - 0.5 (L + 1) / (2 L)."""
    schedule = schedule_of(GPT2, schedule="progressive_layer_drop", train_iters=100_000)
    assert draw_plan(schedule, 0).num_active_layers == 12
    late = [draw_plan(schedule, step).num_active_layers for step in range(90_000, 90_500)]
    assert sum(late) / len(late) == pytest.approx(12 * (1 - 0.5 * 13 / 24), abs=0.2)


def test_the_meter_reports_both_savings():
    schedule, meter = schedule_of(GPT2), FlopsMeter(schedule=schedule_of(GPT2))
    for step in range(150):
        meter.add(draw_plan(schedule, step), tokens=7)
    expected = predicted_saving(schedule, tokens_after=lambda n: n)
    assert meter.saving().layers == pytest.approx(expected.layers)
    assert meter.saving().total == pytest.approx(expected.total)
    restored = FlopsMeter(schedule=schedule)
    restored.load_state_dict(meter.state_dict())
    assert restored.saving() == meter.saving()


def test_the_dry_run_prints_stages_and_both_savings():
    text = "\n".join(
        describe_stages(schedule_of(GPT2, train_iters=150_000), tensor=2, tokens_after=lambda n: n)
    )
    assert "26.67% layers only" in text and "3 heads and 768 neurons per rank" in text
    assert "steps 20000 to 70000" in text


def test_coverage_counts_what_was_trained():
    coverage = Coverage(pools=schedule_of().pools, num_layers=8)
    nested = schedule_of(draw="nested", layers=1, order=["heads+mlp"], ends=[1])
    for step in range(10):
        coverage.add(draw_plan(nested, step))
    summary = coverage.summary("mlp")
    assert (summary.touched, summary.mean, summary.least) == (0.5, 0.5, 0.0)
    restored = Coverage(pools=coverage.pools, num_layers=8)
    restored.load_state_dict(coverage.state_dict())
    restored.add(draw_plan(schedule_of(schedule="dense"), 0))
    assert restored.summary("heads").touched == 1.0


def grow_through(losses, grower, latest=None):
    return [step + 1 for step, loss in enumerate(losses)
            if grower.observe(loss, next_step=step + 1, latest_end=latest)]  # fmt: skip


def new_grower(**options):
    values = {"window": 10, "min_gain": 0.01, "drop_ratio": 0.25, "num_stages": 3} | options
    return AdaptiveGrower(**values)


def test_adaptive_growth_waits_for_the_loss_to_flatten():
    falling = [5.0 - 0.05 * step for step in range(60)]
    assert grow_through(falling, new_grower()) == []
    flat = falling + [2.0] * 30
    assert grow_through(flat, new_grower(num_stages=2)) == [pytest.approx(79, abs=3)]


def test_adaptive_growth_after_a_large_drop_expects_more():
    """The growth at step 20 gains 1 nat at once, so windows of 0.1 nats are too little: grow again."""
    losses = [5.0] * 20 + [4.0 - 0.01 * step for step in range(40)]
    assert grow_through(losses, new_grower()) == [20, 40]
    assert grow_through(losses, new_grower(drop_ratio=0.0)) == [20]


def test_adaptive_growth_stops_at_the_latest_end_and_resumes_from_its_state():
    losses = [5.0 - 0.05 * step for step in range(60)]
    assert grow_through(losses, new_grower(num_stages=2), latest=30) == [30]
    grower = new_grower()
    first = grow_through(losses[:25] + [4.0] * 10, grower)
    restored = new_grower()
    restored.load_state_dict(grower.state_dict())
    rest = [4.0] * 40
    assert grow_through(rest, restored) == grow_through(rest, grower) != []
    assert restored.stage == grower.stage == len(first) + 1 or restored.stage == grower.stage


def test_early_growth_moves_the_stages():
    schedule = schedule_of(schedule="adaptive").with_growth_at([12])
    assert [stage.start for stage in schedule.stages] == [0, 12, 70]
    assert draw_plan(schedule, 12).num_active_layers == 8


def test_a_schedule_names_what_must_agree_on_resume():
    assert schedule_of().identity() == schedule_of().identity()
    for changed in ({"seed": 2}, {"draw": "nested"}, {"mlp": "3/4"}, {"ends": ["1/3", "1/2"]}):
        assert schedule_of(**changed).identity() != schedule_of().identity()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (GPT2, {"heads": "1/5"}, r"2\.4 of 12 heads.*nearest legal rates are 1/6 or 1/4"),
        (GPT2, {"tp_strata": 4}, r"1\.5 of 3 heads.*1/3 or 2/3; or set est.tp_strata to one of \[1, 2, 3, 6"),
        (GPT2, {"tp_strata": 5}, r"est.tp_strata=5 does not divide num_query_groups=12"),
        (TINYLLAMA, {"pp_strata": 2}, r"5\.5 of 11 layers.*5/11 or 6/11"),
        (TINYLLAMA, {"heads": "1/3"}, r"2\.66667 of 8 query heads of a group.*1/4 or 3/8"),
        (TINYLLAMA, {"mlp_align": 128, "tp_strata": 4}, r"multiples of 8: the nearest.*5/11 or 6/11"),
        (GPT2, {"mlp_block_size": 100}, r"mlp_block_size=100 does not divide ffn_hidden_size=3072"),
        (GPT2, {"heads": 2}, r"est.heads=2 must be above 0 and at most 1"),
        (GPT2, {"layers": "0"}, r"est.layers=0 must be above 0"),
        (GPT2, {"mlp": "half"}, r"est.mlp='half' is not a number or a fraction"),
        (GPT2, {"ends": ["1/2"]}, r"want one end for each entry"),
        (GPT2, {"order": ["layers", "heads"]}, r"layers, heads, mlp once each"),
        (GPT2, {"ends": ["1/2", "1/3"]}, r"step 50, before the stage starts at step 75"),
        (GPT2, {"ends": [20, 70]}, r"fraction of the run: at most 1"),
        (GPT2, {"ends": [1.5, 70], "ends_in": "steps"}, r"whole number of steps"),
        (GPT2, {"resample_interval": 0}, r"resample_interval=0 must be at least 1"),
        (GPT2, {"schedule": "stages"}, r"needs a list of stages"),
        (GPT2, {"schedule": "layer_drop", "layer_drop_rate": 1}, r"layer_drop_rate=1 must be below 1"),
        (GPT2, {"pld_theta": 0.0}, r"pld_theta=0.0 must be in"),
        (TINYLLAMA, {"draw": "bernoulli"}, r"set est.gqa_unit=groups or est.heads=1"),
        (GPT2, {"layers": "1/12", "pp_strata": 1, "protect_first_layer": True,
                "protect_last_layer": True}, r"keeps 1 of 12 in a stratum, fewer than the 2 protected"),
        (SMALL, {"schedule": "stages", "stages": [StageConfig(until=1, mlp=["1/2"] * 3)]},
         r"lists 3 rates for 8 layers"),
        (SMALL, {"schedule": "stages", "pp_strata": 2,
                 "stages": [StageConfig(until=1, mlp=["1/2"] * 4 + [1] * 4)]}, r"unequal work"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_with_the_numbers(shape, options, message):
    with pytest.raises(ValueError, match=message):
        schedule_of(shape, **options)


@pytest.mark.parametrize(
    ("layout", "message"),
    [({"tensor": 4}, "est.tp_strata=2 is not a multiple of tensor_model_parallel_size=4"),
     ({"pipeline": 4}, "est.pp_strata=2 is not a multiple of pipeline_model_parallel_size=4"),
     ({"pipeline": 2, "virtual": 3}, "virtual stages 3 = 6")],
)  # fmt: skip
def test_a_layout_that_would_be_uneven_is_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        schedule_of(GPT2).pools.check_layout(**({"tensor": 1, "pipeline": 1} | layout))
