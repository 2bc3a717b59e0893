"""Streaming safetensors folders, GGUF order, exported tokenizers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_tlt.bridge.tokenizer_export import export_tokenizer
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.models.gguf import unpermute
from megatron_tlt.models.hf import ARCHITECTURES
from megatron_tlt.models.hf_files import (
    SafetensorsFolder,
    SafetensorsWriter,
    read_safetensors_dir,
    write_safetensors_dir,
)


def test_sharded_folder_reads_back_bit_equal_and_lazily(tmp_path):
    tensors = {f"t{i}": torch.randn(5, 4, dtype=torch.bfloat16) for i in range(5)}
    write_safetensors_dir(
        tensors.items(), tmp_path / "m", config={"a": 1}, files={"x.json": b"{}"},
        max_shard_bytes=2 * 40,
    )  # fmt: skip
    names = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 40
    weights = SafetensorsFolder(tmp_path / "m")
    assert set(weights) == set(tensors) and weights["t1"].shape == (5, 4)
    for name, tensor in tensors.items():
        assert torch.equal(weights[name][1:3], tensor[1:3])
        assert torch.equal(weights[name][:, 2:], tensor[:, 2:])


def test_an_unpublished_folder_is_invisible_and_an_existing_one_refused(tmp_path):
    writer = SafetensorsWriter(tmp_path / "m")
    writer.write([("a", torch.ones(2))])
    writer.finish({}, {})
    assert not (tmp_path / "m").exists()
    writer.publish()
    with pytest.raises(ValueError, match="exists"):
        SafetensorsWriter(tmp_path / "m")


def test_gpt2_files_without_prefix_read_under_full_names(tmp_path):
    save_file({"wte.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    weights = read_safetensors_dir(tmp_path, ARCHITECTURES["GPT2LMHeadModel"])
    assert list(weights) == ["transformer.wte.weight"]
    assert torch.equal(weights["transformer.wte.weight"][:1], torch.ones(1, 2))


def test_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="safetensors"):
        SafetensorsFolder(tmp_path)


def test_unpermuted_queries_rotate_alike_in_both_conventions():
    """llama.cpp turns neighbours (2i, 2i+1), Hugging Face turns (i, i + d/2) by the same angle: scores of
    rotated queries and keys must agree once rows are reordered."""
    heads, d, h = 2, 8, 5
    torch.manual_seed(0)
    query, key, x = torch.randn(heads * d, h), torch.randn(heads * d, h), torch.randn(2, h)
    angles = 3.0 * torch.arange(d // 2).float().add(1).reciprocal()

    def neighbours(y):  # [heads, d]
        a, b = y[:, 0::2], y[:, 1::2]
        turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.stack(turned, dim=-1).flatten(1)

    def halves(y):
        a, b = y.chunk(2, dim=1)
        turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.cat(turned, dim=1)

    theirs = (neighbours((query @ x[0]).view(heads, d)) * (key @ x[1]).view(heads, d)).sum(1)
    q, k = (unpermute(w, num_heads=heads) for w in (query, key))
    ours = (halves((q @ x[0]).view(heads, d)) * (k @ x[1]).view(heads, d)).sum(1)
    torch.testing.assert_close(ours, theirs)


def test_byte_level_tokenizer_is_exported_with_the_same_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, content in export_tokenizer(TokenizerConfig()).items():
        (tmp_path / name).write_bytes(content)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert loaded("é a\n").input_ids == list("é a\n".encode())
    assert loaded.eos_token_id == 256


def test_a_tokenizer_without_text_is_refused():
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10)
    with pytest.raises(ValueError, match="NullTokenizer"):
        export_tokenizer(config)
