"""One flag family and one checkpoint: pretraining, fine-tuning and RL take over from each other."""

import json

import pytest
import torch

from megatron_tlt import sft
from megatron_tlt.bridge.load import load_model
from megatron_tlt.config import build_parser, parse
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.rl.config import RlConfig
from megatron_tlt.rl.setup import build_run
from megatron_tlt.train.checkpoint import read_train_state
from tests.dist.runs import train

SMALL = [
    "--rollout.rollout_batch_size=2", "--rollout.max_response_len=8", "--rewards.num_workers=0",
    "--training.train_iters=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("journey")
    row = {"prompt": "1+1=", "response": "2", "label": "2"}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    sections = {
        "checkpoint": {"save": str(folder / "pretrain")},
        "training": {"train_iters": 2, "eval_iters": 0},
        "optimizer": {"lr_warmup_iters": 0},
    }
    train(folder / "logs", "tiny-llama", sections)
    arguments = [
        f"--checkpoint.load={folder / 'pretrain'}", f"--checkpoint.save={folder / 'sft'}",
        f"--data.train_data_path=[{folder / 'rows.jsonl'}]", "--training.train_iters=2",
        "--training.global_batch_size=2",
    ]  # fmt: skip
    assert sft.main(arguments) == 0
    return folder


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
@pytest.mark.parametrize("key", ["checkpoint.load", "pretrained_checkpoint"])
def test_rl_starts_from_the_weights_of_an_earlier_stage_with_fresh_counters(root, stage, key):
    parser = build_parser(RlConfig, prog="x", description="x")
    data = f"--data.prompt_data=[{root / 'rows.jsonl'}]"
    config, _ = parse(parser, RlConfig, [*SMALL, f"--{key}={root / stage}", data])
    parallel = init_parallel(ParallelConfig(), seed=1)
    run = build_run(config, parallel)
    assert run.state.iteration == run.cursor.consumed == 0
    loaded = load_model(root / stage, parallel)
    for (name, ours), theirs in zip(
        run.policy.model[0].named_parameters(), loaded.chunks[0].parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    run.close()


def test_fine_tuning_changed_the_weights_and_kept_what_a_later_stage_needs(root):
    state = read_train_state(root / "sft" / "iter_0000002")
    assert state.data["stage"] == "sft" and state.iteration == 2
    assert state.config["tokenizer"]["tokenizer_type"] == "ByteLevelTokenizer"
    parallel = init_parallel(ParallelConfig(), seed=1)
    before, after = (load_model(root / stage, parallel) for stage in ("pretrain", "sft"))
    pairs = zip(before.chunks[0].parameters(), after.chunks[0].parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)
