"""The checks that every conversion has to pass: configuration fields, then logits, against transformers."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from megatron_tlt import device
from megatron_tlt.bridge.reference import reference_logits
from megatron_tlt.models.gpt import GPT, ModelConfig
from megatron_tlt.models.hf_config import rotary_fields
from megatron_tlt.models.logits import full_logits
from megatron_tlt.parallel import Parallel

import torch
import torch.distributed as dist

NUM_POSITIONS = 64
MAX_LOGIT_DIFFERENCE = 1e-3

Result = TypeVar("Result")


def on_first_rank(function: Callable[[], Result]) -> Result:
    """`function()` of rank 0, its result, or its ValueError, on every rank; collective over the world.

    A check that fails on one rank alone would leave the others waiting in the next collective.
    """
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except ValueError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0, device=device.device())
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


def verify_config(model: ModelConfig, folder: str | Path, *, vocab_size: int) -> dict[str, object]:
    """Compare `model` with `folder`/config.json as transformers itself reads it.

    Returns the compared fields. Raises ValueError listing every field in which the two differ.
    """
    import transformers  # 5 s to import, and only the verification needs it

    config = transformers.AutoConfig.from_pretrained(folder)
    theirs, ours = _hf_facts(config), _our_facts(model, vocab_size)
    differences = [
        f"{name}: config.json {theirs[name]!r}, model {ours[name]!r}"
        for name in ours
        if theirs[name] != ours[name]
    ]
    if differences:
        raise ValueError(f"{folder} is another model: " + "; ".join(differences))
    return ours


def _our_facts(model: ModelConfig, vocab_size: int) -> dict[str, object]:
    rope = model.position_embedding_type == "rope"
    return dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        head_dim=model.kv_channels,
        vocab_size=vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        norm_epsilon=model.norm_epsilon,
        tied=not model.untie_embeddings_and_output_weights,
        rope_theta=float(model.rotary_base) if rope else None,
        rope_scaling_factor=model.rotary_scaling_factor if rope else None,
    )


def _hf_facts(config: object) -> dict[str, object]:
    """The same facts out of a transformers configuration object, GPT-2's or a Llama-like one."""
    values = config.to_dict()
    heads = config.num_attention_heads
    neurons = values.get("intermediate_size") or values.get("n_inner")
    rope = rotary_fields(values) if config.model_type != "gpt2" else {}
    epsilon = values.get("layer_norm_epsilon", values.get("rms_norm_eps"))
    return dict(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=neurons or 4 * config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        norm_epsilon=epsilon,
        tied=config.tie_word_embeddings,
        rope_theta=float(rope["rope_theta"]) if rope else None,
        rope_scaling_factor=rope.get("factor"),
    )


def verify_logits(
    chunks: list[GPT],
    parallel: Parallel,
    folder: str | Path,
    *,
    rounded_to: torch.dtype | None = None,
    seed: int = 1234,
) -> float:
    """Largest difference of logits to transformers' over random tokens, both in float32.

    All positions of NUM_POSITIONS count: position 0 alone hides a wrong rotary embedding. Rank 0 runs
    transformers on `folder`. Collective over the world. Raises ValueError above MAX_LOGIT_DIFFERENCE.
    """
    vocab = chunks[0].true_vocab_size
    length = min(NUM_POSITIONS, chunks[0].max_position_embeddings)
    tokens = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(seed))
    for chunk in chunks:
        chunk.eval()
    with float32_compute(chunks):
        ours = full_logits(chunks, parallel, tokens.to(device.device()), dtype=torch.float32)
    if dist.get_rank() == 0:
        theirs = reference_logits(folder, tokens, rounded_to=rounded_to).to(ours.device)
    else:
        theirs = torch.empty_like(ours)
    dist.broadcast(theirs, src=0)
    largest = (ours - theirs).abs().max().nan_to_num(nan=torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if largest > MAX_LOGIT_DIFFERENCE:
        raise ValueError(
            f"the converted model is not that of {folder}: its logits differ from transformers' by up "
            f"to {largest:.3g} over {length} positions (at most {MAX_LOGIT_DIFFERENCE} is accepted)"
        )
    return float(largest)


@contextlib.contextmanager
def float32_compute(chunks: list[GPT]) -> Iterator[None]:
    """Inside, forward passes use the weights in float32, one layer's copy at a time."""
    if all(p.dtype == torch.float32 for chunk in chunks for p in chunk.parameters()):
        yield
        return
    handles, kept = [], {}

    def enlarge(module, args, kwargs):
        kept[module] = [(p, p.data) for p in module.parameters()]
        for param, _ in kept[module]:
            param.data = param.data.float()
        return tuple(map(_as_float32, args)), {k: _as_float32(v) for k, v in kwargs.items()}

    def restore(module, *_: object) -> None:
        for param, data in kept.pop(module):
            param.data = data

    for chunk in chunks:
        for module in _streamed_modules(chunk):
            handles.append(module.register_forward_pre_hook(enlarge, with_kwargs=True))
            handles.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _streamed_modules(chunk: GPT) -> list[torch.nn.Module]:
    modules = list(chunk.decoder.layers)
    if chunk.pre_process:
        modules.append(chunk.embedding)
    if chunk.post_process:
        modules += [chunk.decoder.final_layernorm, chunk.output_layer]
    return modules


def _as_float32(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return value
