"""A small Llama trained on countdown search traces in plain torch: text that benchmarks can speculate on."""

import math
import random
import time

import torch
import torch.nn.functional as F
import transformers

from megatron_tlt.data.countdown import ALPHABET, CountdownConfig, draw_problem, write_trace
from megatron_tlt.ops.linear import native_bf16_gemm
from megatron_tlt.types import Prompt

BOS, EOS, _FIRST = 0, 1, 2
VOCAB = 32


def encode(text: str) -> list[int]:
    """One token a character."""
    return [ALPHABET.index(character) + _FIRST for character in text]


def build(layers: int, hidden: int) -> transformers.PreTrainedModel:
    """A Llama with heads of 64 and a character vocabulary."""
    heads = hidden // 64
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts(count: int, *, seed: int) -> list[Prompt]:
    """Problems that training with another seed does not see."""
    rng, config = random.Random(seed), CountdownConfig()
    problems = [draw_problem(rng, config) for _ in range(count)]
    return [
        Prompt(prompt_id=i, tokens=(BOS, *encode(problem.prompt)))
        for i, problem in enumerate(problems)
    ]


def _batch(rng: random.Random, *, rows: int, length: int) -> torch.Tensor:
    """Token ids `[rows, length + 1]`, documents one after the other."""
    config, stream = CountdownConfig(), []
    while len(stream) < rows * (length + 1):
        problem = draw_problem(rng, config)
        trace = write_trace(problem, rng, config)
        if trace is not None:
            stream += [BOS, *encode(problem.prompt + trace), EOS]
    return torch.tensor(stream[: rows * (length + 1)]).view(rows, length + 1)


def train(
    model: transformers.PreTrainedModel, *, seconds: float, rows: int = 4, length: int = 256
) -> float:
    """AdamW with a cosine over `seconds` of processor time, bf16 autocast where the CPU has it; the last loss
    in nats a token."""
    rng = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    begin, loss, step = time.process_time(), math.nan, 0
    model.train()
    while (done := (time.process_time() - begin) / seconds) < 1:
        warm = min(1.0, (step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        ids = _batch(rng, rows=rows, length=length)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=native_bf16_gemm()):
            logits = model(ids[:, :-1], use_cache=False).logits
        value = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss, step = float(value.detach()), step + 1
        if step % 100 == 0:
            print(f"target: step {step}, {100 * done:.0f} % of the time, loss {loss:.3f}", flush=True)
    model.eval()
    return loss
