"""Tiny targets and drafters for the real SGLang, and engines over them."""

import torch
import transformers

from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.sglang.config import SglangConfig
from megatron_tlt.rollout.sglang.engine import SglangEngine
from megatron_tlt.rollout.tuner import FixedPolicy
from megatron_tlt.types import Prompt, Strategy

VOCAB = 61
PROMPTS = [
    Prompt(prompt_id=i, tokens=tuple((7 * i + 3 * j + 1) % VOCAB for j in range(4 + 5 * i)))
    for i in range(5)
]
OFF = Strategy()
CHAIN = Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4)
NGRAM = Strategy(drafter="ngram", num_steps=4, num_draft_tokens=5)
TREE = Strategy(drafter="eagle", num_steps=3, topk=4, num_draft_tokens=8)


def target(*, seed: int = 1, layers: int = 4, scale: float = 0.1) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=192, vocab_size=VOCAB, bos_token_id=0,
            eos_token_id=0, architectures=["LlamaForCausalLM"],
        )
    )  # fmt: skip
    for parameter in model.parameters():  # far from the tiny default, so that tokens differ
        parameter.data += torch.randn_like(parameter) * scale
    return model.eval()


def config_of(model: transformers.PreTrainedModel) -> dict:
    return model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}


def exact_pair(*, seed: int = 5) -> tuple[transformers.LlamaForCausalLM, Drafter]:
    """A one-layer target without attention, and a drafter that computes the same thing."""
    model = target(seed=seed, layers=1)
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.data.zero_()
    model.model.norm.weight.data.fill_(1.0)  # the drafter leaves the norm out: a positive factor
    drafter = Drafter(DrafterConfig.for_target(config_of(model)))
    drafter.fc.weight.data = torch.cat((torch.eye(32), torch.zeros(32, 32)), 1)
    own = drafter.layers[0]
    own.self_attn.o_proj.weight.data.zero_()
    own.mlp.load_state_dict(layer.mlp.state_dict())
    own.post_attention_layernorm.load_state_dict(layer.post_attention_layernorm.state_dict())
    return model, drafter


def sglang_engine(
    model: transformers.PreTrainedModel, *, drafter: Drafter | None = None, **options
) -> SglangEngine:
    config = SglangConfig(**{"max_model_len": 160, "max_running_requests": 16, "timeout_s": 240.0} | options)
    engine = SglangEngine(
        config_of(model), config, drafter=None if drafter is None else drafter.config
    )
    if drafter is not None:
        engine.update_weights("draft", drafter.state_dict().items(), version=1)
    engine.update_weights("target", model.state_dict().items(), version=1)
    return engine


def native_engine(
    model: transformers.PreTrainedModel, *, drafter: Drafter | None = None, strategy: Strategy = OFF,
    **options,
) -> NativeEngine:  # fmt: skip
    engine = NativeEngine(
        config_of(model), NativeEngineConfig(**{"max_model_len": 160, "max_batch": 16} | options),
        drafter=None if drafter is None else drafter.config, policy=FixedPolicy(strategy=strategy),
    )  # fmt: skip
    engine.update_weights("target", model.state_dict().items(), version=1)
    if drafter is not None:
        engine.update_weights("draft", drafter.state_dict().items(), version=1)
    return engine


def tokens_of(rollouts) -> dict:
    return {(r.prompt_id, r.sample_index): r.tokens for r in rollouts}
