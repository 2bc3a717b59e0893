"""Configuration: what is wrong is named, what is right comes back the same."""

import pytest
import yaml

from megatron_tlt.config import build_parser, parse, to_yaml
from megatron_tlt.pretrain import main
from megatron_tlt.train.config import PretrainConfig

SMALL = [
    "--model.preset=tiny-gpt2",
    "--training.train_iters=3",
    "--training.global_batch_size=4",
    "--data.mock_data=true",
]


@pytest.fixture(scope="module")
def parser():
    return build_parser(PretrainConfig, prog="x", description="x", flags={"dry_run": "Only look."})


def load(parser, *arguments):
    return parse(parser, PretrainConfig, [*SMALL, *arguments])


def test_a_preset_fills_in_and_a_given_field_wins(parser):
    config, flags = load(parser, "--model.num_layers=2")
    assert (config.model.num_layers, config.model.hidden_size) == (2, 64)
    assert flags == {}


def test_flags_come_back_by_name(parser):
    assert load(parser, "--dry_run")[1] == {"dry_run": True}


def test_the_resolved_configuration_reads_back_to_the_same(parser, tmp_path):
    config, _ = load(
        parser, "--parallel.virtual_pipeline_model_parallel_size=2",
        "--parallel.pipeline_model_parallel_size=2", "--optimizer.lr=1e-3",
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again, _ = parse(parser, PretrainConfig, [f"--config={tmp_path}/config.yaml"])
    assert again == config and to_yaml(again) == to_yaml(config)


def test_the_command_line_wins_over_the_file(parser, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"optimizer": {"lr": 0.5}, "training": {"train_iters": 9}}))
    config, _ = parse(parser, PretrainConfig, [f"--config={path}", *SMALL, "--optimizer.lr=0.25"])
    assert (config.optimizer.lr, config.training.train_iters) == (0.25, 3)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--model.hiden_size=3"], ("model.hiden_size", "did you mean 'model.hidden_size'")),
        (["--lr=3"], ("'lr'", "did you mean 'optimizer.lr'")),
        (["--training.train-iter=3"], ("did you mean 'training.train_iters'",)),
        (["--training.seed=abc"], ("training.seed", "abc")),
        (["--optimizer.lr_decay_style=square"], ("optimizer.lr_decay_style", "square")),
        (["--config=missing.yaml"], ("missing.yaml",)),
        (["--model.preset=gpt5"], ("gpt5", "gpt2-124m")),
        (["--parallel.context_parallel_size=2"], ("context_parallel_size", "2")),
        (["--parallel.expert_model_parallel_size=2"], ("expert_model_parallel_size", "2")),
        (["--training.global_batch_size=0"], ("global_batch_size=0", "at least 1")),
        (["--optimizer.min_lr=1"], ("min_lr=1", "lr=")),
        (["--optimizer.overlap_param_gather=true"], ("use_distributed_optimizer",)),
        (["--checkpoint.save_interval=5"], ("checkpoint.save",)),
        (["--parallel.sequence_parallel=true"], ("sequence_parallel", "tensor_model")),
        (["--parallel.virtual_pipeline_model_parallel_size=2"], ("pipeline_model_parallel_size",)),
        (["--model.kv_channels=15", "--model.position_embedding_type=rope"], ("even", "15")),
    ],
)
def test_bad_input_is_refused_with_its_name_value_and_remedy(parser, arguments, words):
    with pytest.raises(ValueError) as error:
        load(parser, *arguments)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_key_in_the_file_is_refused_with_a_suggestion(parser, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  hiden_size: 3\n")
    with pytest.raises(ValueError, match="model.hiden_size.*did you mean 'model.hidden_size'"):
        parse(parser, PretrainConfig, [*SMALL, f"--config={path}"])
    path.write_text("modle:\n  hidden_size: 3\n")
    with pytest.raises(ValueError, match="modle.hidden_size.*did you mean 'model.hidden_size'"):
        parse(parser, PretrainConfig, [*SMALL, f"--config={path}"])


@pytest.mark.parametrize(
    "arguments,world_size,words",
    [
        (["--parallel.tensor_model_parallel_size=2"], 3, ("3 ranks", "multiple of 2")),
        (["--training.micro_batch_size=3"], 1, ("global batch size 4", "micro_batch_size=3")),
        (["--parallel.tensor_model_parallel_size=8"], 8, ("8", "num_query_groups=4")),
        (["--parallel.pipeline_model_parallel_size=3"], 3, ("num_layers=4", "3")),
        (["--optimizer.lr_warmup_iters=3"], 1, ("warm-up of 3", "decay of 3")),
        (["--optimizer.lr_decay_style=WSD", "--optimizer.lr_wsd_decay_iters=9"], 1, ("9", "3")),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_any_work(parser, arguments, world_size, words):
    config, _ = load(parser, *arguments)
    with pytest.raises(ValueError) as error:
        config.check(world_size)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_help_explains_every_field(parser):
    text = " ".join(parser.format_help().split())
    for section in PretrainConfig.__dataclass_fields__.values():
        for name in section.type.__dataclass_fields__:
            assert f"--{section.name}.{name} " in text
    missing = [
        action.dest for action in parser._actions if "." in action.dest and not action.help
    ]
    assert missing == []


def test_dry_run_prints_the_plan_and_trains_nothing(capsys):
    assert main([*SMALL, "--dry_run"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for word in ("layout: 1 ranks", "parameters: ", "FLOPs per step", "memory about"):
        assert word in printed.out
    assert "lm loss" not in printed.out


def test_bad_input_ends_in_one_line_and_exit_code_2(capsys):
    assert main([*SMALL, "--model.hiden_size=1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "error: unknown configuration key 'model.hiden_size': did you mean 'model.hidden_size'?\n"
    )
