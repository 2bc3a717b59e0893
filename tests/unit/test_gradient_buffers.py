"""Weight gradients that go straight into Megatron's buffers equal those that autograd hands over."""

import pytest

from megatron_tlt.models.gpt import GPT, ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.ops.linear import linear
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.train.optimizer import OptimizerConfig, wrap_data_parallel

import torch

VOCAB, B, S = 100, 3, 16
GPT2 = {"preset": "tiny-gpt2", "num_layers": 2}
LLAMA = {"preset": "tiny-llama", "num_layers": 2}
MODELS = {
    "tied head, biases": GPT2,
    "untied head, learned positions": GPT2 | {"untie_embeddings_and_output_weights": True},
    "no biases": LLAMA,
    "tied head, rotary, query/key/value bias": LLAMA
    | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    "recomputed layers": LLAMA | {"recompute_granularity": "full"},
    "recomputed MLP, biases": GPT2
    | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}


@pytest.fixture(scope="module")
def parallel():
    torch.set_num_threads(1)
    return init_parallel(ParallelConfig(), seed=1)


def build(config: dict, parallel) -> GPT:
    (gpt,) = build_chunks(ModelConfig(**config), parallel, vocab_size=VOCAB)
    initialize_parameters([gpt], seed=3, vocab_size=VOCAB)
    return gpt


def losses_of(model: torch.nn.Module) -> torch.Tensor:
    text = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(S).expand(B, S)
    return model(text[:, :-1], positions, None, labels=text[:, 1:])


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    losses_of(model).sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped reduction"])
@pytest.mark.parametrize("name", MODELS)
def test_two_micro_batches_are_summed_in_every_step(name, overlap, parallel):
    expected = gradients(build(MODELS[name], parallel))
    wrapped = build(MODELS[name], parallel)
    options = OptimizerConfig(overlap_grad_reduce=overlap)
    (chunk,) = wrap_data_parallel([wrapped], options, parallel)
    for step in range(2):  # the second step finds the marks that the first has left
        chunk.zero_grad_buffer()
        with chunk.no_sync():
            gradients(chunk)
        left = gradients(chunk)
        chunk.finish_grad_sync()
        assert all(grad is None for grad in left.values()), "memory of a second gradient"
        for key, param in wrapped.named_parameters():
            torch.testing.assert_close(
                param.main_grad, 2 * expected[key], rtol=1e-4, atol=1e-5,
                msg=lambda text: f"step {step}, {key}: {text}",
            )  # fmt: skip


def test_a_frozen_weight_collects_nothing():
    x = torch.randn(6, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(4, 8), requires_grad=False)
    weight.main_grad = torch.zeros(4, 8)
    linear(x, weight).sum().backward()
    assert not weight.main_grad.any()
    torch.testing.assert_close(x.grad, weight.sum(dim=0).expand(6, 8))


def test_a_pass_in_inference_mode_does_not_spoil_training_after_it(parallel):
    model = build(LLAMA | {"seq_length": 17}, parallel)
    with torch.inference_mode():
        before = losses_of(model)
    assert all(grad is not None for grad in gradients(model).values())
    torch.testing.assert_close(losses_of(model), before.clone())
