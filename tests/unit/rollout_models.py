"""Tiny random targets, engines over them, and a policy that never does the same thing twice."""

import torch
import transformers

from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.types import OFF, Prompt, Strategy

VOCAB = 61
COMMON = dict(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0)
LLAMA = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=160, **COMMON,
)  # fmt: skip
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=160, **COMMON),
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=16),
}
NGRAM = Strategy(drafter="ngram", num_steps=5, num_draft_tokens=6)
SUBNET = Strategy(drafter="subnet", num_steps=3, num_draft_tokens=4)
PROMPTS = [
    Prompt(prompt_id=i, tokens=tuple((7 * i + 3 * j) % VOCAB for j in range(4 + 5 * i)))
    for i in range(5)
]


def reference(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for parameter in model.parameters():  # far from the tiny default, so that tokens differ
        parameter.data += torch.randn_like(parameter) * 0.1
    return model.eval()


def make_engine(
    kind: str = "llama", *, policy=None, decode=None, drafter=None, **sizes
) -> NativeEngine:
    model = reference(kind)
    config = NativeEngineConfig(**{"max_model_len": 100, "max_batch": 8, **sizes})
    engine = NativeEngine(
        model.config.to_dict(), config, policy=policy, decode=decode, drafter=drafter
    )
    engine.update_weights("target", model.state_dict().items(), version=1)
    return engine


class Alternate:
    """Another strategy every step."""

    def __init__(self, *strategies: Strategy) -> None:
        self.strategies, self.steps = strategies, 0

    def select(self, batch: int, context=None) -> Strategy:
        self.steps += 1
        return self.strategies[self.steps % len(self.strategies)]

    def record(self, strategy, *, batch, tokens, seconds) -> None:
        pass


def tokens_of(rollouts) -> dict:
    return {(r.prompt_id, r.sample_index): r.tokens for r in rollouts}
