"""Initial weights that do not depend on the parallel layout.

Each parameter is drawn whole from a generator seeded by (seed, its global name), then cut to the part
that this rank holds. So TP1 and TP2 x PP2 start from the same model (up to nothing: bit-equal), which
megatron-core's own initialisation, one RNG stream per rank, does not give.
"""

import hashlib
import math
import re
from collections.abc import Iterator

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)

import torch
from megatron.core.models.gpt import GPTModel

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Transformer Engine's names of the norms that it fuses into the linears after them, and ours."""


def global_parameters(chunk: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) with layer numbers counted over the whole model, from 0; the same names for both
    back-ends.

    The tied copy of the embedding on the last pipeline stage goes under the embedding's name.
    """
    layers = chunk.decoder.layers
    tied = chunk.share_embeddings_and_output_weights
    for name, param in chunk.named_parameters():
        found = _LAYER.match(name)
        if found:
            number = layers[int(found.group(1))].layer_number - 1
            name = f"decoder.layers.{number}.{_unfused(name[found.end() :])}"
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, param


def _unfused(name: str) -> str:
    for fused, own in _FUSED_NORMS.items():
        name = name.replace(fused, own)
    return name


def initialize_parameters(chunks: list[GPTModel], *, seed: int, vocab_size: int) -> None:
    """Draw every parameter of `chunks` in place: N(0, init_method_std), output projections over
    sqrt(2 num_layers) as Megatron does, norms 1, biases 0, padded vocabulary rows 0."""
    for chunk in chunks:
        config, group = chunk.config, chunk.pg_collection.tp
        for name, param in global_parameters(chunk):
            with torch.no_grad():
                if "norm" in name.rsplit(".", 2)[-2]:
                    param.fill_(0.0 if name.endswith("bias") else 1.0)
                elif name.endswith("bias"):
                    param.zero_()
                else:
                    std = config.init_method_std
                    if "linear_proj" in name or "linear_fc2" in name:
                        std /= math.sqrt(2 * config.num_layers)
                    rows = vocab_size if _is_vocab(name) else None
                    _draw(param, name, seed=seed, std=std, true_rows=rows, tp=group)


def _is_vocab(name: str) -> bool:
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")


def _draw(
    param: torch.nn.Parameter,
    name: str,
    *,
    seed: int,
    std: float,
    true_rows: int | None,
    tp: torch.distributed.ProcessGroup,
) -> None:
    split = getattr(param, "tensor_model_parallel", False)
    dim, world, rank = getattr(param, "partition_dim", 0), tp.size(), tp.rank()
    shape = list(param.shape)
    if split:
        shape[dim] *= world
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    rows = shape[0] if true_rows is None else true_rows
    full = torch.zeros(shape)
    full[:rows].normal_(0.0, std, generator=generator)
    if split:
        # A gated fc1 holds [gate_k; up_k] on rank k: `partition_stride` blocks, each cut over TP.
        blocks = full.chunk(getattr(param, "partition_stride", 1), dim=dim)
        full = torch.cat([block.chunk(world, dim=dim)[rank] for block in blocks], dim=dim)
    param.copy_(full)
