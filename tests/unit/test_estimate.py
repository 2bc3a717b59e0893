"""Parameter counts against published models and built ones; FLOPs against torch's counter."""

import pytest

from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.presets import PRESETS
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.train.estimate import count_parameters, flops_per_token, state_bytes

import torch
from torch.utils.flop_counter import FlopCounterMode

# name: (vocabulary, parameters as the model's card or Hugging Face's num_parameters() gives them)
PUBLISHED = {
    "gpt2-124m": (50257, 124_439_808),
    "gpt2-355m": (50257, 354_823_168),
    "gpt2-774m": (50257, 774_030_080),
    "gpt2-1.5b": (50257, 1_557_611_200),
    "tinyllama-1.1b": (32000, 1_100_048_384),
    "llama3-8b": (128256, 8_030_261_248),
    "qwen2.5-0.5b": (151936, 494_032_768),
    "qwen2.5-1.5b": (151936, 1_543_714_304),
    "qwen2.5-7b": (152064, 7_615_616_512),
    "smollm2-135m": (49152, 134_515_008),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset):
    vocab_size, published = PUBLISHED[preset]
    assert count_parameters(ModelConfig(preset=preset), padded_vocab_size=vocab_size).total == published


def test_every_preset_that_is_published_is_checked():
    assert set(PRESETS) == set(PUBLISHED) | {"tiny-gpt2", "tiny-llama"}


@pytest.mark.parametrize("preset", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("extra", [{}, {"qk_layernorm": True}, {"add_qkv_bias": True}])
def test_the_count_equals_the_built_model(preset, extra):
    parallel = init_parallel(ParallelConfig(), seed=1)
    model = ModelConfig(preset=preset, **extra)
    (chunk,) = build_chunks(model, parallel, vocab_size=300)
    counts = count_parameters(model, padded_vocab_size=model.padded_vocab_size(300, 1))
    assert sum(p.numel() for p in chunk.parameters()) == counts.total
    assert counts.on_rank(0, ParallelConfig()) == counts.total


@pytest.mark.parametrize("preset", ["tiny-gpt2", "tiny-llama"])
def test_flops_equal_torchs_count_of_the_matrix_products(preset):
    parallel = init_parallel(ParallelConfig(), seed=1)
    model = ModelConfig(preset=preset)
    (chunk,) = build_chunks(model, parallel, vocab_size=300)
    for param in chunk.parameters():
        torch.nn.init.normal_(param, std=0.02)
    tokens = torch.zeros(2, model.seq_length, dtype=torch.long)
    positions = torch.arange(model.seq_length)[None].expand(2, -1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        chunk(tokens, positions, None)
    counted = counter.get_total_flops()
    # torch counts no fused attention on CPU: add the causal half of the scores and values.
    n, d, s = model.num_attention_heads, model.kv_channels, model.seq_length
    attention = 2 * 2 * n * d * (s * (s + 1) / 2) * 2 * model.num_layers
    padded = model.padded_vocab_size(300, 1)
    flops = flops_per_token(model, padded_vocab_size=padded) * tokens.numel() / 3
    assert flops == pytest.approx(counted + attention, rel=1e-6)


def test_state_bytes_are_16_and_18_a_parameter_and_shard_only_the_optimizer():
    assert state_bytes(1000, bf16=False, optimizer_shards=1) == 16_000
    assert state_bytes(1000, bf16=True, optimizer_shards=1) == 18_000
    assert state_bytes(1000, bf16=True, optimizer_shards=4) == 6_000 + 3_000
