"""Hugging Face names and layouts as data: a table of rows per architecture and three transforms.

A row joins one Megatron parameter to the Hugging Face tensors that make it up. Three rows need more than
cutting: queries, keys and values are interleaved per group (`qkv`), gate and up are stacked (`gate_up`),
the vocabulary is padded (`vocab`). Shapes: n query heads, g key/value groups, d head dim, f MLP neurons,
h hidden, v vocabulary, t TP size; weights are `[out, in]`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Layout = Literal["replicated", "rows", "columns", "qkv", "gate_up", "vocab"]


class LazyTensor(Protocol):
    """A tensor whose elements are read when it is sliced; `torch.Tensor` is one."""

    shape: tuple[int, ...]

    def __getitem__(self, index: object) -> torch.Tensor: ...


Weights = Mapping[str, LazyTensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter. Example: Row("mlp.linear_fc1.weight", ("mlp.gate_proj.weight",
    "mlp.up_proj.weight"), "gate_up")."""

    megatron: str
    """Global Megatron name; inside a layer without `decoder.layers.<i>.`."""
    hf: tuple[str, ...]
    """Hugging Face names, likewise; a fused query/key/value tensor is a single name."""
    layout: Layout
    """How tensor parallelism cuts it, and which transform it takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The names of one Hugging Face architecture."""

    name: str
    model_type: str
    prefix: str
    """What stands before the base model's names; some hub files leave it out."""
    layer: str
    """Layer prefix with `{}` for the number."""
    outer: tuple[Row, ...]
    layers: tuple[Row, ...]
    transposed: frozenset[str] = frozenset()
    """Layer tensors stored as `[in, out]` (GPT-2's Conv1D)."""
    ignored: str = r"(?!)"
    """Pattern of tensors in hub files that are not parameters (masks, rotary tables)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The numbers that transforms need. Example: Geometry(num_attention_heads=9, num_query_groups=3,
    kv_channels=64, vocab_size=49152)."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """True vocabulary, without padding."""

    def qkv_rows(self) -> tuple[int, int, int]:
        """Output rows of queries, keys, values."""
        keys = self.num_query_groups * self.kv_channels
        return self.num_attention_heads * self.kv_channels, keys, keys


def _weight_and_bias(megatron: str, hf: tuple[str, ...], layout: Layout) -> tuple[Row, Row]:
    bias_layout: Layout = "replicated" if layout == "columns" else layout
    return (
        Row(f"{megatron}.weight", tuple(f"{name}.weight" for name in hf), layout),
        Row(f"{megatron}.bias", tuple(f"{name}.bias" for name in hf), bias_layout),
    )


_GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    prefix="transformer.",
    layer="transformer.h.{}.",
    outer=(
        Row("embedding.word_embeddings.weight", ("transformer.wte.weight",), "vocab"),
        Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",), "replicated"),
        *_weight_and_bias("decoder.final_layernorm", ("transformer.ln_f",), "replicated"),
        Row("output_layer.weight", ("lm_head.weight",), "vocab"),
    ),
    layers=(
        *_weight_and_bias("input_layernorm", ("ln_1",), "replicated"),
        *_weight_and_bias("self_attention.linear_qkv", ("attn.c_attn",), "qkv"),
        *_weight_and_bias("self_attention.linear_proj", ("attn.c_proj",), "columns"),
        *_weight_and_bias("pre_mlp_layernorm", ("ln_2",), "replicated"),
        *_weight_and_bias("mlp.linear_fc1", ("mlp.c_fc",), "rows"),
        *_weight_and_bias("mlp.linear_fc2", ("mlp.c_proj",), "columns"),
    ),
    transposed=frozenset(
        ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    ),
    ignored=r".*\.attn\.(bias|masked_bias)",
)

_LLAMA_OUTER = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"),
    Row("output_layer.weight", ("lm_head.weight",), "vocab"),
)
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA_LAYERS = (
    Row("input_layernorm.weight", ("input_layernorm.weight",), "replicated"),
    *_weight_and_bias("self_attention.linear_qkv", _QKV, "qkv"),
    *_weight_and_bias("self_attention.linear_proj", ("self_attn.o_proj",), "columns"),
    Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "replicated"),
    *_weight_and_bias("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), "gate_up"),
    *_weight_and_bias("mlp.linear_fc2", ("mlp.down_proj",), "columns"),
)
_QWEN3_LAYERS = (
    *_LLAMA_LAYERS,
    Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "replicated"),
    Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "replicated"),
)


def _llama_like(name: str, model_type: str, layers: tuple[Row, ...]) -> Architecture:
    return Architecture(
        name=name,
        model_type=model_type,
        prefix="model.",
        layer="model.layers.{}.",
        outer=_LLAMA_OUTER,
        layers=layers,
        ignored=r".*\.rotary_emb\.inv_freq",
    )


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        _GPT2,
        _llama_like("LlamaForCausalLM", "llama", _LLAMA_LAYERS),
        _llama_like("Qwen2ForCausalLM", "qwen2", _LLAMA_LAYERS),
        _llama_like("Qwen3ForCausalLM", "qwen3", _QWEN3_LAYERS),
    )
}

# Transformer Engine fuses a norm into the linear that follows; the parameter is the same.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter's row with the layer number filled in."""

    hf: tuple[str, ...]
    layout: Layout
    transposed: bool


def place_of(architecture: Architecture, megatron_name: str) -> Place:
    """Where the parameter of this global name lives on the Hugging Face side.

    Raises ValueError when the architecture has no such parameter.
    """
    found = _LAYER.fullmatch(megatron_name)
    name = found.group(2) if found else megatron_name
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    for row in architecture.layers if found else architecture.outer:
        if row.megatron == name:
            prefix = architecture.layer.format(found.group(1)) if found else ""
            transposed = bool(found) and row.hf[0] in architecture.transposed
            return Place(tuple(prefix + hf for hf in row.hf), row.layout, transposed)
    raise ValueError(f"{architecture.name} has no place for the parameter {megatron_name}")


def interleave_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, num_query_groups: int
) -> torch.Tensor:
    """q `[n d, ...]`, k and v `[g d, ...]` -> `[(n + 2g) d, ...]`: per group its queries, key, value."""
    parts = [x.reshape(num_query_groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def split_qkv(
    qkv: torch.Tensor, *, num_query_groups: int, kv_channels: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `interleave_qkv`."""
    grouped = qkv.reshape(num_query_groups, -1, *qkv.shape[1:])
    queries = grouped.shape[1] - 2 * kv_channels
    q, k, v = grouped.split((queries, kv_channels, kv_channels), dim=1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def pad_vocab(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`rows` with zero rows appended up to `num_rows`."""
    return torch.cat((rows, rows.new_zeros(num_rows - rows.shape[0], *rows.shape[1:])))


class _Part:
    """Output rows `start..start+size` of a tensor that may be stored transposed."""

    def __init__(self, tensor: LazyTensor, *, transposed: bool, start: int, size: int) -> None:
        self.tensor, self.transposed, self.start, self.size = tensor, transposed, start, size

    def rows(self, first: int, last: int) -> torch.Tensor:
        first, last = self.start + first, self.start + last
        return self.tensor[:, first:last].t() if self.transposed else self.tensor[first:last]

    def columns(self, first: int, last: int) -> torch.Tensor:
        return self.tensor[first:last, :].t() if self.transposed else self.tensor[:, first:last]


def hf_shapes(
    place: Place, local_shape: tuple[int, ...], geometry: Geometry, *, tp_size: int
) -> tuple[tuple[int, ...], ...]:
    """Whole Hugging Face shapes of the tensors behind a parameter whose TP part is `local_shape`."""
    out, *rest = local_shape
    match place.layout:
        case "columns":
            rest = [rest[0] * tp_size]
        case "rows":
            out *= tp_size
        case "vocab":
            out = geometry.vocab_size
        case "gate_up":
            out = out * tp_size // 2
    outs = (out,) * len(place.hf)
    if place.layout == "qkv":
        sizes = geometry.qkv_rows()
        outs = sizes if len(place.hf) == 3 else (sum(sizes),)
    shapes = [(size, *rest) for size in outs]
    return tuple(shape[::-1] if place.transposed else shape for shape in shapes)


def _parts(place: Place, tensors: list[LazyTensor], geometry: Geometry) -> list[_Part]:
    """The row blocks that the layout speaks of: q, k, v; gate, up; or the tensor itself."""
    if place.layout == "qkv" and len(tensors) == 1:
        sizes = geometry.qkv_rows()
        starts = (0, sizes[0], sizes[0] + sizes[1])
        blocks = [(tensors[0], start, size) for start, size in zip(starts, sizes, strict=True)]
    else:
        blocks = [(x, 0, x.shape[-1 if place.transposed else 0]) for x in tensors]
    return [_Part(x, transposed=place.transposed, start=a, size=n) for x, a, n in blocks]


def read_part(
    place: Place,
    weights: Weights,
    local_shape: tuple[int, ...],
    geometry: Geometry,
    *,
    tp_rank: int,
    tp_size: int,
) -> torch.Tensor:
    """This TP rank's part, `local_shape`, of a parameter; reads no more of `weights` than it needs.

    Raises ValueError when a tensor is missing or has another shape than the model's.
    """
    tensors = []
    for name, shape in zip(
        place.hf, hf_shapes(place, local_shape, geometry, tp_size=tp_size), strict=True
    ):
        if name not in weights:
            raise ValueError(f"the weights hold no tensor {name}")
        tensor = weights[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model needs {shape}")
        tensors.append(tensor)
    parts = _parts(place, tensors, geometry)

    def rows_of(part: _Part) -> torch.Tensor:
        return part.rows(part.size * tp_rank // tp_size, part.size * (tp_rank + 1) // tp_size)

    match place.layout:
        case "replicated":
            return parts[0].rows(0, parts[0].size)
        case "columns":
            width = local_shape[1]
            return parts[0].columns(tp_rank * width, (tp_rank + 1) * width)
        case "qkv":
            q, k, v = (rows_of(part) for part in parts)
            return interleave_qkv(q, k, v, num_query_groups=geometry.num_query_groups // tp_size)
        case "vocab":
            first = min(tp_rank * local_shape[0], geometry.vocab_size)
            last = min(first + local_shape[0], geometry.vocab_size)
            return pad_vocab(parts[0].rows(first, last), local_shape[0])
    return torch.cat([rows_of(part) for part in parts])  # rows, gate_up


def whole_tensors(
    place: Place, pieces: torch.Tensor, geometry: Geometry
) -> Iterable[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) out of the `[t, *local]` pieces of all TP ranks."""
    match place.layout:
        case "replicated":
            wholes = (pieces[0],)
        case "columns":
            wholes = (pieces.transpose(0, 1).flatten(1, 2),)
        case "gate_up":
            gate, up = pieces.unflatten(1, (2, -1)).unbind(1)
            wholes = (gate.flatten(0, 1), up.flatten(0, 1))
        case "vocab":
            wholes = (pieces.flatten(0, 1)[: geometry.vocab_size],)
        case "qkv":
            wholes = split_qkv(
                pieces.flatten(0, 1),
                num_query_groups=geometry.num_query_groups,
                kv_channels=geometry.kv_channels,
            )
            if len(place.hf) == 1:
                wholes = (torch.cat(wholes),)
        case _:
            wholes = (pieces.flatten(0, 1),)
    for name, whole in zip(place.hf, wholes, strict=True):
        yield name, (whole.t() if place.transposed else whole).contiguous()
