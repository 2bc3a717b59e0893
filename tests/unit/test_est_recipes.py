"""The EST recipes: their dry run needs neither data nor tokenizer files and states the published saving."""

from pathlib import Path

import pytest

from megatron_tlt.pretrain import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOKENIZER = ["--tokenizer.tokenizer_type=NullTokenizer", "--dry_run"]


def dry_run(capsys, recipe: str, vocab_size: int, *arguments: str) -> str:
    command = [f"--config={EXAMPLES / recipe}", *TOKENIZER, f"--tokenizer.vocab_size={vocab_size}"]
    assert main([*command, *arguments]) == 0
    return capsys.readouterr().out


# Layers only: 0.75 a + 0.5 b, a and b the shares of the first two stages; "in all" counts the head too.
@pytest.mark.parametrize(
    ("recipe", "vocab_size", "layers_only", "in_all"),
    [
        ("est_gpt2_124m.yaml", 50256, "26.67%", 18.9),
        ("est_tinyllama_1b.yaml", 31999, "25.00%", 23.6),
    ],
)
def test_the_dry_run_states_the_published_saving(recipe, vocab_size, layers_only, in_all, capsys):
    printed = dry_run(capsys, recipe, vocab_size)
    (line,) = [line for line in printed.splitlines() if "FLOPs saved over the run" in line]
    assert f"{layers_only} layers only (the paper's count)" in line
    assert float(line.split("count), ")[1].split("%")[0]) == pytest.approx(in_all, abs=0.06)


def test_the_dry_run_shows_each_stage_with_its_shapes_per_rank(capsys):
    printed = dry_run(capsys, "est_gpt2_124m.yaml", 50256)
    for words in (
        "steps 0 to 20000: layers 1/2 heads 1/2 mlp 1/2; 6 of 12 layers, 6 heads and 1536 neurons",
        "steps 20000 to 70000: layers 1 heads 1/2 mlp 1/2; 12 of 12 layers",
        "steps 70000 to 150000: layers 1 heads 1 mlp 1; 12 of 12 layers, 12 heads and 3072 neurons",
        "FLOPs 0.2500 of the layers",
        "balanced for tensor parallelism up to 2",
    ):
        assert words in printed, words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--est.layers=1/5"], ("rate 1/5 of layers keeps 2.4 of 12", "1/6 or 1/4")),
        (["--est.heads=5/11"], ("rate 5/11 of heads", "nearest legal rates are 5/12 or 1/2")),
        (["--est.ends=[70000,20000]"], ("est.ends", "before the stage starts at step 70000")),
        (["--est.tp_strata=5"], ("est.tp_strata=5 does not divide num_query_groups=12",)),
    ],
)
def test_bad_rates_are_refused_before_any_work(arguments, words, capsys):
    command = [f"--config={EXAMPLES / 'est_gpt2_124m.yaml'}", *TOKENIZER]
    assert main([*command, "--tokenizer.vocab_size=50256", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert all(word in printed.err for word in words), printed.err


@pytest.mark.parametrize("recipe", ["est_tiny_cpu.yaml", "quickstart.yaml"])
def test_the_cpu_recipes_plan_nested_stages(recipe, capsys):
    # What launch/quickstart.sh adds.
    own = [] if recipe.startswith("est") else ["--data.mock_data=true", "--checkpoint.save=unused"]
    printed = dry_run(capsys, recipe, 2047, *own)
    assert printed.count("; FLOPs ") == 3 and "FLOPs saved over the run" in printed
    assert "output_scale: none" in printed and "draw: nested" in printed
