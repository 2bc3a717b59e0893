"""Hugging Face -> checkpoint under TP2 x PP2 -> Hugging Face, against transformers."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron_tlt.bridge.convert import hf_to_megatron
from megatron_tlt.models.hf import ARCHITECTURES
from megatron_tlt.models.hf_files import read_hf_config
from tests.dist.bridge_tasks import layout, refusal, round_trip, stream_in_memory
from tests.dist.runs import read_metrics, train
from tests.dist.workers import run_distributed

transformers = pytest.importorskip("transformers")

VOCAB = 301  # padded to 512 rows under TP2
LLAMA = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SCALED = dict(
    rope_theta=500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
MODELS = {
    "gpt2": (
        transformers.GPT2Config,
        dict(vocab_size=VOCAB, n_embd=64, n_layer=4, n_head=4, n_positions=128, bos_token_id=0),
    ),
    "llama-tied": (transformers.LlamaConfig, LLAMA | dict(tie_word_embeddings=True)),
    "llama-untied-scaled": (
        transformers.LlamaConfig,
        LLAMA | dict(tie_word_embeddings=False, rope_parameters=SCALED, head_dim=32),
    ),
    "qwen2-bf16": (transformers.Qwen2Config, LLAMA | dict(tie_word_embeddings=False)),
    "qwen3": (transformers.Qwen3Config, LLAMA | dict(tie_word_embeddings=True, head_dim=32)),
}


def save_random_model(folder, name: str) -> None:
    """A model whose every tensor, norms and biases too, is random, so that no swap goes unseen."""
    config_class, fields = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**fields))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1)
            if "norm" in parameter_name or ".ln_" in parameter_name:
                parameter.add_(1.0)
    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    model.to(dtype).save_pretrained(folder)


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    save_random_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals") / "hf"
    save_random_model(folder, "llama-tied")
    return folder


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def test_round_trip_is_bit_equal_and_logits_are_those_of_transformers(source, tmp_path):
    differences = run_distributed(round_trip, 4, source, tmp_path, 2, 2)
    assert max(max(pair) for pair in differences) <= 1e-4
    before, after = tensors_of(source), tensors_of(tmp_path / "hf")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert read_hf_config(tmp_path / "hf")["vocab_size"] == VOCAB


def test_streaming_in_small_buckets_reaches_every_rank_and_reads_back(tied_llama):
    assert run_distributed(stream_in_memory, 4, tied_llama) == [True] * 4


@pytest.mark.parametrize(
    "change,named",
    [
        (dict(num_hidden_layers=8), "missing"),
        (dict(num_hidden_layers=2), "unknown"),
        (dict(intermediate_size=192), "shape"),
        (dict(rope_parameters=dict(rope_type="yarn", factor=2.0, rope_theta=1e4)), "yarn"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights_is_refused_on_every_rank(
    tied_llama, tmp_path, change, named
):
    bad = tmp_path / "hf"
    bad.mkdir()
    (bad / "model.safetensors").symlink_to(tied_llama / "model.safetensors")
    config = read_hf_config(tied_llama) | change
    (bad / "config.json").write_text(json.dumps(config))
    for message in run_distributed(refusal, 4, bad, tmp_path):
        assert named in message
    assert not (tmp_path / "checkpoint").exists()


def test_training_goes_on_from_a_converted_checkpoint_by_its_config_yaml(tied_llama, tmp_path):
    """Converted on one rank, then 20 steps under TP2; what was written to config.yaml suffices."""
    hf_to_megatron(tied_llama, tmp_path / "checkpoint", layout(1, 1))
    sections = yaml.safe_load((tmp_path / "checkpoint" / "config.yaml").read_text())
    sections["model"]["seq_length"] = 64
    sections |= {
        "training": dict(train_iters=20),
        "parallel": dict(tensor_model_parallel_size=2),
        "optimizer": dict(lr=1e-2),
    }
    results = run_distributed(train, 2, tmp_path / "logs", None, sections)
    assert [r["iteration"] for r in results] == [20, 20]
    losses = [m["lm loss"] for m in read_metrics(tmp_path / "logs")]
    assert losses[-1] < losses[0] - 0.1


def test_every_architecture_has_a_round_trip():
    covered = {config_class.__name__.removesuffix("Config") for config_class, _ in MODELS.values()}
    names = {name.removesuffix("LMHeadModel").removesuffix("ForCausalLM") for name in ARCHITECTURES}
    assert names == covered
