"""Tiny random targets and drafters, engines over them, and a policy that never does the same thing twice."""

import torch
import transformers

from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.types import Prompt, Strategy

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
CHAIN = Strategy(drafter="eagle", num_steps=4, num_draft_tokens=5)
TREE = Strategy(drafter="eagle", num_steps=3, topk=4, num_draft_tokens=12)
HYBRID = Strategy(drafter="hybrid", num_steps=3, topk=3, num_draft_tokens=10)
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


def drafter_config(kind: str = "llama", layout: str = "eagle") -> DrafterConfig:
    target = reference(kind).config.to_dict()
    if layout == "eagle":
        return DrafterConfig.for_target(target)
    sizes = DrafterConfig.for_target(target)
    fields = {name: getattr(sizes, name) for name in DrafterConfig.__slots__}
    return DrafterConfig(
        **fields | dict(layout="eagle3", draft_vocab_size=41, feature_layers=(0, 1, 2))
    )


def make_drafter(kind: str = "llama", layout: str = "eagle") -> Drafter:
    model = reference(kind)
    torch.manual_seed(8)
    drafter = Drafter(drafter_config(kind, layout))
    for parameter in drafter.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    if layout == "eagle3":
        drafter.draft_tokens([t for t in range(VOCAB) if t % 3 != 2])
    head = model.get_output_embeddings().weight.data
    drafter.share(model.get_input_embeddings().weight.data, head)
    return drafter


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
