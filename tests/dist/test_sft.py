"""Fine-tuning: a loss over responses alone, the same under every layout, resumed exactly, and learning."""

import json

import pytest
import torch

from megatron_tlt.data.tokenizer import ByteLevelTokenizer
from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.models.logits import score_tokens
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.train.sft import SftDataConfig, batch_indices, read_examples
from tests.dist.rl_tasks import ONE, PP2, TP2, run_sft
from tests.dist.workers import run_distributed


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    rows = [{"prompt": f"{i}+{i}=", "response": f"{2 * i}" + "." * (i % 7)} for i in range(24)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def losses(root, name: str, layout: dict, world_size: int, **training) -> list[float]:
    run_distributed(run_sft, world_size, root, root / name, layout, training)
    lines = map(json.loads, (root / name / "logs" / "metrics.jsonl").read_text().splitlines())
    return [line["lm loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def expected(root):
    return losses(root, "one", ONE, 1)


def test_the_loss_is_the_mean_over_response_tokens_and_eos(root, expected):
    tokenizer = ByteLevelTokenizer()
    data = read_examples(
        [str(root / "sft.jsonl")], SftDataConfig(train_data_path=[]), tokenizer, max_length=64
    )
    parallel = init_parallel(ParallelConfig(), seed=1)
    model = ModelConfig(preset="tiny-llama")
    chunks = build_chunks(model, parallel, vocab_size=tokenizer.vocab_size)
    initialize_parameters(chunks, seed=1234, vocab_size=tokenizer.vocab_size)
    total = count = 0.0
    for i in batch_indices(len(data), consumed=0, size=8, seed=1234):
        ids = torch.tensor([data.prompts[i] + data.responses[i]])
        assert int(ids[0, -1]) == tokenizer.eos
        log_probs, _ = score_tokens(chunks, parallel, ids[:, :-1], ids[:, 1:])
        total -= float(log_probs[0, len(data.prompts[i]) - 1 :].sum())
        count += len(data.responses[i])
    assert expected[0] == pytest.approx(total / count, abs=1e-5)
    assert expected[-1] < expected[0] - 0.5


@pytest.mark.parametrize("name,layout", [("TP2", TP2), ("PP2", PP2), ("DP2", ONE)])
def test_losses_do_not_depend_on_the_layout(root, expected, name, layout):
    assert losses(root, name, layout, 2) == pytest.approx(expected, abs=2e-5)


def test_a_resumed_run_goes_on_with_the_next_examples(root, expected):
    losses(root, "resumed", ONE, 1, train_iters=3)
    assert losses(root, "resumed", ONE, 1) == pytest.approx(expected, abs=1e-6)


def test_every_epoch_visits_every_example_once():
    taken = [i for step in range(9) for i in batch_indices(6, consumed=4 * step, size=4, seed=7)]
    epochs = [taken[n : n + 6] for n in range(0, 36, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3


@pytest.mark.parametrize(
    "line,words",
    [("[1]", "not a JSON object"), ("{", "not JSON"), ('{"prompt": "a"}', "response")],
)
def test_a_line_that_is_no_example_is_named(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"bad.jsonl:2: .*{words}"):
        config = SftDataConfig(train_data_path=[])
        read_examples([str(path)], config, ByteLevelTokenizer(), max_length=9)


def test_examples_that_are_too_long_are_left_out_and_counted(root):
    data = read_examples(
        [str(root / "sft.jsonl")],
        SftDataConfig(train_data_path=[]),
        ByteLevelTokenizer(),
        max_length=8,
    )
    assert data.num_too_long > 0 and len(data) + data.num_too_long == 24
