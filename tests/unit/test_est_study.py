"""The EST study's figures, on curves whose answers are seen at a glance."""

import json

import pytest

from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from tools.bench.est_curve import arguments, campaign, read_runs, runs_file
from tools.bench.est_summary import reaches, summarise
from tools.bench.est_variants import VARIANTS, model_options


def run_of(
    variant: str, losses: list[float], *, lr=1e-3, seed=1, cost=1.0, regime="single_epoch"
) -> dict:
    cell = {
        "shape": "gpt2", "regime": regime, "hidden": 64, "layers": 4, "seq": 32, "steps": 4,
        "global_batch": 8, "dtype": "fp32", "variant": variant, "est": {}, "lr": lr, "seed": seed,
    }  # fmt: skip
    curve = [
        {"loss": loss, "flops": 10.0 * cost * step, "cpu_s": 2.0 * cost * step, "wall_s": 3.0 * cost * step}
        for step, loss in enumerate(losses, 1)
    ]
    return {"cell": cell, "parameters": 512, "curve": curve}


def test_a_curve_reaches_a_loss_between_evaluations_in_proportion():
    curve = run_of("x", [5.0, 4.0, 3.0, 2.0])["curve"]
    assert reaches(curve, 4.0, "flops") == 20.0
    assert reaches(curve, 2.5, "flops") == pytest.approx(35.0)
    assert reaches(curve, 6.0, "cpu_s") == 2.0  # there before the first evaluation: not extrapolated
    assert reaches(curve, 1.0, "flops") is None


def test_a_variant_is_compared_with_dense_at_the_best_rate_of_each():
    runs = [
        run_of("dense", [5.0, 4.0, 3.5, 3.0]),
        run_of("dense", [5.0, 4.0, 3.0, 2.0], lr=2e-3),
        run_of("small", [4.0, 3.0, 2.0, 1.5], lr=2e-3, cost=0.5),
        run_of("small", [9.0, 9.0, 9.0, 9.0], lr=4e-3, cost=0.5),
    ]
    rows, summary = summarise(runs)
    row = {row["variant"]: row for row in rows}["small"]
    assert (row["lr"], row["dense_lr"], row["seeds"]) == (2e-3, 2e-3, 1)
    assert row["flops_to_dense_loss"] == row["seconds_to_dense_loss"] == pytest.approx(15 / 40)
    assert row["loss_gap_equal_steps"] == -0.5 and row["flops_of_dense"] == 0.5
    assert row["tokens_per_parameter"] == 2.0
    assert summary["variant"] == "small" and summary["flops_to_dense_loss"] == 0.375


def test_a_rate_is_chosen_on_the_seeds_that_all_rates_have():
    """Seed 2, hard, was run with the better rate only: it must not count against that rate."""
    runs = [
        run_of("dense", [2.0]), run_of("dense", [2.0], seed=2),
        run_of("a", [1.0]), run_of("a", [9.0], seed=2), run_of("a", [3.0], lr=4e-3),
    ]  # fmt: skip
    row = {row["variant"]: row for row in summarise(runs)[0]}["a"]
    assert (row["lr"], row["seeds"], row["loss_gap_equal_steps"]) == (1e-3, 2, 3.0)


def test_where_tokens_are_repeated_the_best_loss_counts():
    limited = dict(regime="limited")
    runs = [
        run_of("dense", [5.0, 3.0, 4.0, 9.0], **limited),
        run_of("dense", [5.0, 4.5, 4.0, 3.5], lr=2e-3, **limited),  # better at the end, worse at its best
        run_of("a", [4.0, 3.5, 2.5, 8.0], cost=0.5, **limited),
    ]
    rows, summary = summarise(runs)
    row = {row["variant"]: row for row in rows}["a"]
    assert (row["dense_lr"], row["best_loss"], row["best_loss_gap"]) == (1e-3, 2.5, -0.5)
    assert row["flops_to_dense_loss"] == pytest.approx(12.5 / 20)  # at 3.0, half-way from 3.5 to 2.5
    assert summary["best_loss_gap"] == -0.5 and summary["seeds"] == 1


def test_a_study_of_two_regimes_is_refused():
    runs = [run_of("dense", [3.0, 2.0]), run_of("a", [3.0, 2.0], regime="limited")]
    with pytest.raises(SystemExit, match=r"\['limited', 'single_epoch'\]"):
        summarise(runs)


def test_one_seed_that_never_reaches_the_dense_loss_leaves_no_figure():
    runs = [run_of("dense", [3.0, 2.0], seed=seed) for seed in (1, 2)]
    runs += [run_of("a", [3.0, 1.5]), run_of("a", [3.0, 2.5], seed=2)]
    _, summary = summarise(runs)
    assert summary["flops_to_dense_loss"] is None
    assert summary["loss_gap_equal_steps"] == 0.0 and summary["seeds"] == 2


def test_a_campaign_goes_on_with_what_is_missing_after_a_kill_in_the_middle_of_a_line(tmp_path):
    options = arguments(["--toy", "--output", str(tmp_path)])
    options.steps, options.variants = [2], ["dense", "nested"]
    first = campaign(options)
    path = runs_file(options)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["cell"]["variant"] for line in lines] == ["dense", "nested"]
    path.write_text(lines[0] + "\n" + lines[1][:50])
    assert read_runs(path) == first[:1]
    again = campaign(options)
    assert [run["cell"] for run in again] == [run["cell"] for run in first]
    assert again[1]["curve"][-1]["loss"] == pytest.approx(first[1]["curve"][-1]["loss"], abs=1e-6)


def test_every_variant_is_legal_at_the_studys_default_shapes():
    for shape in ("gpt2", "llama"):
        model = ModelConfig(**model_options(shape, hidden=256, layers=6, seq=256))
        for options in VARIANTS.values():
            build_schedule(
                EstConfig(**options), ModelShape.of(model, padded_vocab_size=2048), train_iters=1500,
                seed=1, tokens_after=lambda n: n,
            )  # fmt: skip
