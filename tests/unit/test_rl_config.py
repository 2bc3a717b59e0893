"""The command lines of SFT and RL: recipes parse, wrong input is named, a dry run builds nothing."""

import json
from pathlib import Path

import pytest

from megatron_tlt import sft
from megatron_tlt.config import build_parser, parse, to_yaml
from megatron_tlt.rl.__main__ import main
from megatron_tlt.rl.config import RlConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RL_RECIPES = sorted([*EXAMPLES.glob("grpo_*.yaml"), *EXAMPLES.glob("dapo_*.yaml")])
SMALL = [
    "--model.preset=tiny-llama", "--tokenizer.tokenizer_type=ByteLevelTokenizer",
    "--rollout.rollout_batch_size=4", "--training.train_iters=1", "--rollout.max_response_len=20",
    "--rewards.reward=exact", "--rewards.num_workers=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def parser():
    return build_parser(RlConfig, prog="x", description="x")


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    return f"--data.prompt_data=[{path}]"


def load(parser, *arguments) -> RlConfig:
    return parse(parser, RlConfig, [*SMALL, *arguments])[0]


@pytest.mark.parametrize("path", RL_RECIPES, ids=lambda p: p.stem)
def test_an_rl_recipe_is_valid_and_says_where_it_comes_from(parser, path):
    config, _ = parse(parser, RlConfig, [f"--config={path}"])
    config.check(16)
    assert path.read_text().startswith("# ")
    assert config.rollout.max_response_len < config.training.max_tokens_per_gpu


def test_the_sft_recipe_is_valid():
    parser = build_parser(sft.SftConfig, prog="x", description="x")
    config, _ = parse(
        parser, sft.SftConfig, [f"--config={EXAMPLES / 'sft_countdown_cpu.yaml'}"]
    )
    assert config.data.append_eos


def test_the_resolved_configuration_reads_back_to_the_same(parser, tmp_path):
    config = load(parser, "--algorithm.algorithm=dapo", "--speculation=ngram")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again, _ = parse(parser, RlConfig, [f"--config={tmp_path}/config.yaml"])
    assert again == config


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--rollout.n_sample_per_prompt=3"], ["did you mean 'rollout.n_samples_per_prompt'"]),
        (["--algorithm.algorithm=ppo2"], ["algorithm"]),
        (["--training.global_batch_size=5"], ["4", "8 = 32", "global_batch_size=5"]),
        (["--rollout.temperature=0"], ["temperature=0"]),
        (["--debug_rollout_only=true"], ["save_debug_rollout_data"]),
        (["--debug_train_only=true"], ["load_debug_rollout_data"]),
        (["--speculation=eagle9"], ["speculation", "eagle9"]),
    ],
)
def test_wrong_input_is_named(parser, arguments, words):
    with pytest.raises(ValueError) as error:
        load(parser, *arguments)
    for word in words:
        assert word in str(error.value)


def test_a_dry_run_prints_the_plan_and_builds_nothing(prompts, capsys):
    assert main([*SMALL, prompts, "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "4 prompts x 8 responses" in out and "rollout engines" in out and "GiB while" in out


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--rollout.max_response_len=61"], ["65", "max_position_embeddings=64"]),
        (["--training.max_tokens_per_gpu=20"], ["max_response_len=20", "24 tokens"]),
        (["--checkpoint.load=nowhere"], ["nowhere"]),
        (["--tokenizer=null"], ["tokenizer"]),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_built(prompts, capsys, arguments, words):
    assert main([*SMALL, prompts, *arguments]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error
