"""Hugging Face names to the fused, sharded weights of the inference model, as a table of places."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_tlt.rollout.native.layers import Linear, rotary_order
from megatron_tlt.rollout.native.model import Layer, NativeModel

# Buffers that hub files carry beside the parameters.
_IGNORED = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias)$")


@dataclass(slots=True)
class Place:
    """Where one tensor goes: `target[..., start : start + size]` after cutting and turning."""

    target: torch.Tensor
    """A parameter of this rank; linear weights are `[in, out]`."""
    shape: tuple[int, ...]
    """Shape under the Hugging Face name."""
    transposed: bool = False
    """Stored `[out, in]`, wanted `[in, out]`."""
    start: int = 0
    """First column of `target`."""
    shard: tuple[int, int, int] = (-1, 0, 1)
    """(dimension cut for tensor parallelism after turning, this rank, ranks); -1: not cut."""
    order: torch.Tensor | None = None
    """Order of the columns within each head (rotary pairs)."""

    def put(self, tensor: torch.Tensor) -> None:
        value = tensor.t() if self.transposed else tensor
        dim, rank, size = self.shard
        if dim >= 0:
            value = value.chunk(size, dim)[rank]
        if self.order is not None:
            heads = value.unflatten(-1, (-1, len(self.order)))
            value = heads[..., self.order.to(value.device)].flatten(-2)
        self.target.narrow(-1, self.start, value.shape[-1]).copy_(value)


class WeightLoader:
    """Streams (name, tensor) pairs into a `NativeModel`, in any order and in parts."""

    def __init__(self, model: NativeModel) -> None:
        self.model = model
        self.rank, self.size = model.tp.rank, model.tp.size
        self.order = rotary_order(model.shape.head_dim) if model.table is not None else None
        self.places: dict[str, list[Place]] = {}
        if model.shape.model_type == "gpt2":
            self._gpt2()
        else:
            self._llama_like()
        self.missing = set(self.places)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors to their places. Raises ValueError on an unknown name or a wrong shape.

        With tied embeddings a head of its own name is ignored. Names never loaded stay in `missing`.
        """
        head = self._head_name()
        for name, tensor in tensors:
            if _IGNORED.match(name) or (name == "lm_head.weight" and head != name):
                continue
            for place in self._find(name):
                if tuple(tensor.shape) != place.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(tensor.shape)}, the model wants {place.shape}: "
                        "the weights belong to another configuration"
                    )
                place.put(tensor)
        for linear in self.model.linears():
            linear.pack()

    def check_complete(self) -> None:
        """Raises ValueError naming the parameters that were never given."""
        if self.missing:
            some = ", ".join(sorted(self.missing)[:5])
            raise ValueError(f"{len(self.missing)} weights were not given, such as {some}")

    def _find(self, name: str) -> list[Place]:
        prefix = "transformer." if self.model.shape.model_type == "gpt2" else "model."
        full = name if name in self.places else prefix + name
        if full not in self.places:
            raise ValueError(
                f"weight {name!r} is unknown to a {self.model.shape.model_type} of "
                f"{self.model.shape.num_layers} layers"
            )
        self.missing.discard(full)
        return self.places[full]

    def _head_name(self) -> str:
        tied = self.model.shape.tied
        if self.model.shape.model_type == "gpt2":
            return "transformer.wte.weight" if tied else "lm_head.weight"
        return "model.embed_tokens.weight" if tied else "lm_head.weight"

    def _outer(self, embedding: str) -> None:
        model = self.model
        size = (model.shape.vocab_size, model.shape.hidden_size)
        self.places[embedding] = [Place(model.embedding, size)]
        head = _HeadPlace(
            model.head.weight, size, transposed=True, shard=(1, self.rank, self.size)
        )
        self.places.setdefault(self._head_name(), []).append(head)

    def _linear(
        self, name: str, linear: Linear, *, width: int, start: int = 0, column: bool = True,
        order: torch.Tensor | None = None, conv1d: bool = False,
    ) -> None:  # fmt: skip
        """A part of `linear`, `width` output columns over all ranks (row-parallel: all columns)."""
        cut = (1 if column else 0, self.rank, self.size)
        inner = linear.weight.shape[0] * (1 if column else self.size)
        shape = (inner, width) if conv1d else (width, inner)
        self.places[name + ".weight"] = [
            Place(linear.weight, shape, not conv1d, start=start, shard=cut, order=order)
        ]
        if linear.bias is not None:
            cut = (0 if column else -1, self.rank, self.size)
            self.places[name + ".bias"] = [
                Place(linear.bias, (width,), start=start, shard=cut, order=order)
            ]

    def _norm(self, name: str, norm: object) -> None:
        for kind in ("weight", "bias"):
            target = getattr(norm, kind)
            if target is not None:
                self.places[f"{name}.{kind}"] = [Place(target, tuple(target.shape))]

    def _llama_like(self) -> None:
        self._outer("model.embed_tokens.weight")
        self._norm("model.norm", self.model.norm)
        for index, layer in enumerate(self.model.layers):
            self._llama_layer(f"model.layers.{index}.", layer)

    def _llama_layer(self, prefix: str, layer: Layer) -> None:
        shape, attention = self.model.shape, layer.attention
        heads, groups = shape.num_attention_heads, shape.num_query_groups
        column = 0
        for part, count, local, order in (
            ("q", heads, attention.heads, self.order),
            ("k", groups, attention.groups, self.order),
            ("v", groups, attention.groups, None),
        ):
            self._linear(
                f"{prefix}self_attn.{part}_proj", attention.qkv, width=count * shape.head_dim,
                start=column, order=order,
            )  # fmt: skip
            column += local * shape.head_dim
        hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
        self._linear(f"{prefix}self_attn.o_proj", attention.out, width=hidden, column=False)
        self._linear(f"{prefix}mlp.gate_proj", layer.mlp.up, width=ffn)
        self._linear(f"{prefix}mlp.up_proj", layer.mlp.up, width=ffn, start=ffn // self.size)
        self._linear(f"{prefix}mlp.down_proj", layer.mlp.down, width=hidden, column=False)
        self._norm(prefix + "input_layernorm", layer.norm1)
        self._norm(prefix + "post_attention_layernorm", layer.norm2)
        if attention.qk_norm is not None:
            for part, rows in (("q", slice(attention.heads)), ("k", slice(attention.heads, None))):
                target = attention.qk_norm[rows]
                place = Place(target, (shape.head_dim,), order=self.order)
                self.places[f"{prefix}self_attn.{part}_norm.weight"] = [place]

    def _gpt2(self) -> None:
        self._outer("transformer.wte.weight")
        positions = self.model.positions
        self.places["transformer.wpe.weight"] = [Place(positions, tuple(positions.shape))]
        self._norm("transformer.ln_f", self.model.norm)
        for index, layer in enumerate(self.model.layers):
            self._gpt2_layer(f"transformer.h.{index}.", layer)

    def _gpt2_layer(self, prefix: str, layer: Layer) -> None:
        shape, attention = self.model.shape, layer.attention
        hidden = shape.hidden_size
        self._gpt2_qkv(prefix + "attn.c_attn", attention.qkv)
        conv = dict(conv1d=True, column=False)
        self._linear(prefix + "attn.c_proj", attention.out, width=hidden, **conv)
        self._linear(prefix + "mlp.c_fc", layer.mlp.up, width=shape.ffn_hidden_size, conv1d=True)
        self._linear(prefix + "mlp.c_proj", layer.mlp.down, width=hidden, **conv)
        self._norm(prefix + "ln_1", layer.norm1)
        self._norm(prefix + "ln_2", layer.norm2)

    def _gpt2_qkv(self, name: str, linear: Linear) -> None:
        """One fused tensor whose three parts are cut by rank one by one."""
        hidden = self.model.shape.hidden_size
        cut, local = (-1, self.rank, self.size), hidden // self.size
        for kind, target, shape in (
            ("weight", linear.weight, (hidden, 3 * hidden)),
            ("bias", linear.bias, (3 * hidden,)),
        ):
            self.places[f"{name}.{kind}"] = [
                _QkvPlace(target, shape, start=part * local, shard=(part, *cut[1:]))
                for part in range(3)
            ]


class _HeadPlace(Place):
    """Head rows by ceiling division: the last rank's surplus columns stay zero."""

    def put(self, tensor: torch.Tensor) -> None:
        _, rank, size = self.shard
        rows = -(-len(tensor) // size)
        value = tensor[rank * rows : (rank + 1) * rows]
        self.target[:, : len(value)].copy_(value.t())


class _QkvPlace(Place):
    """Part `shard[0]` of a fused [q | k | v] tensor."""

    def put(self, tensor: torch.Tensor) -> None:
        part, rank, size = self.shard
        value = tensor.chunk(3, -1)[part].chunk(size, -1)[rank]
        self.target.narrow(-1, self.start, value.shape[-1]).copy_(value)
