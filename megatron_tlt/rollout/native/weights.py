"""Hugging Face names to the fused, sharded weights of the inference model, as a table of places."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_tlt.rollout.checksum import Checksum
from megatron_tlt.rollout.native.eagle import EagleModel
from megatron_tlt.rollout.native.layers import Linear, rotary_order
from megatron_tlt.rollout.native.model import Attention, Layer, Mlp, NativeModel

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
    """(name, tensor) pairs, in any order, into a `NativeModel`: all of them or none."""

    def __init__(self, model: NativeModel) -> None:
        self.model = model
        self.rank, self.size = model.tp.rank, model.tp.size
        self.order = rotary_order(model.shape.head_dim) if model.table is not None else None
        self.places: dict[str, list[Place]] = {}
        self._fill()

    def _fill(self) -> None:
        if self.model.shape.model_type == "gpt2":
            self._gpt2()
        else:
            self._llama_like()

    def load(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, checksum: str | None = None
    ) -> None:
        """Look at every tensor first, then copy all to their places.

        The tensors must stay as they are until this returns. With tied embeddings a head of its own name is
        ignored. Raises ValueError on an unknown name, a wrong shape, a parameter that is not given, or where
        `weights_checksum` of the tensors is not `checksum`; nothing has changed then, nor where the
        iterator raises.
        """
        staged: list[tuple[list[Place], torch.Tensor]] = []
        missing, total = set(self.places), Checksum()
        for name, tensor in tensors:
            if checksum is not None:
                total.add(name, tensor)
            if self._ignored(name):
                continue
            full = self._full_name(name)
            missing.discard(full)
            for place in self.places[full]:
                if tuple(tensor.shape) != place.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(tensor.shape)}, the model wants {place.shape}: "
                        "the weights belong to another configuration"
                    )
            staged.append((self.places[full], tensor))
        if missing:
            some = ", ".join(sorted(missing)[:5])
            raise ValueError(f"{len(missing)} weights were not given, such as {some}: give all of them")
        if checksum is not None and total.value() != checksum:
            raise ValueError(
                f"the weights' checksum is {total.value()}, expected {checksum}: they changed on the way"
            )
        for places, tensor in staged:
            for place in places:
                place.put(tensor)
        for part in (*self.model.linears(), *self.model.norms()):
            part.pack()

    def _ignored(self, name: str) -> bool:
        head = self._head_name()
        return bool(_IGNORED.match(name)) or (name == "lm_head.weight" and head != name)

    def _full_name(self, name: str) -> str:
        prefix = "transformer." if self.model.shape.model_type == "gpt2" else "model."
        full = name if name in self.places else prefix + name
        if full not in self.places:
            raise ValueError(
                f"weight {name!r} is unknown to a {self.model.shape.model_type} of "
                f"{self.model.shape.num_layers} layers"
            )
        return full

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
        self._attention(prefix, layer.attention)
        self._gated_mlp(prefix, layer.mlp)
        self._norm(prefix + "input_layernorm", layer.norm1)
        self._norm(prefix + "post_attention_layernorm", layer.norm2)

    def _attention(self, prefix: str, attention: Attention) -> None:
        shape = self.model.shape
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
        self._linear(
            f"{prefix}self_attn.o_proj", attention.out, width=shape.hidden_size, column=False
        )
        if attention.qk_norm is not None:
            for part, rows in (("q", slice(attention.heads)), ("k", slice(attention.heads, None))):
                target = attention.qk_norm[rows]
                place = Place(target, (shape.head_dim,), order=self.order)
                self.places[f"{prefix}self_attn.{part}_norm.weight"] = [place]

    def _gated_mlp(self, prefix: str, mlp: Mlp) -> None:
        hidden, ffn = self.model.shape.hidden_size, self.model.shape.ffn_hidden_size
        self._linear(f"{prefix}mlp.gate_proj", mlp.up, width=ffn)
        self._linear(f"{prefix}mlp.up_proj", mlp.up, width=ffn, start=ffn // self.size)
        self._linear(f"{prefix}mlp.down_proj", mlp.down, width=hidden, column=False)

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


class DraftLoader(WeightLoader):
    """An exported drafter (`models.drafter`) into an `EagleModel`.

    Tables of the target that some files carry too are left out: they are the target's, never the drafter's.
    """

    model: EagleModel

    def _fill(self) -> None:
        model = self.model
        size, fc = model.shape.hidden_size, model.fc.weight.shape[0]
        self.places["fc.weight"] = [Place(model.fc.weight, (size, fc), transposed=True)]
        if model.fc.bias is not None:
            self.places["fc.bias"] = [Place(model.fc.bias, (size,))]
        prefix = "midlayer." if model.eagle3 else "layers.0."
        self._attention(prefix, model.attention)
        self._gated_mlp(prefix, model.mlp)
        self._norm(prefix + "post_attention_layernorm", model.norm2)
        if model.eagle3:
            self._norm(prefix + "input_layernorm", model.embedding_norm)
            self._norm(prefix + "hidden_norm", model.hidden_norm)
            self._norm("norm", model.norm)
            head = (model.config.head_size, size)
            self.places["lm_head.weight"] = [Place(model.head.weight, head, transposed=True)]
            self.places["d2t"] = [_OffsetPlace(model.draft_tokens, head[:1])]

    def _ignored(self, name: str) -> bool:
        tables = ["embed_tokens.weight", "t2d"] + ["lm_head.weight"] * (not self.model.eagle3)
        return name.removeprefix("model.") in tables

    def _full_name(self, name: str) -> str:
        full = name.removeprefix("model.")
        if full not in self.places:
            raise ValueError(
                f"weight {name!r} is unknown to a drafter of layout {self.model.config.layout!r}"
            )
        return full


class _OffsetPlace(Place):
    """Target tokens of a draft vocabulary, from offsets to the draft's own numbering."""

    def put(self, tensor: torch.Tensor) -> None:
        self.target.copy_(tensor.to(self.target) + torch.arange(len(tensor), device=self.target.device))


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
