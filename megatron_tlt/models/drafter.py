"""The EAGLE drafter: one decoder layer that continues the target's hidden states, for training.

Row i of a sequence joins `tokens[i]` with the target's state from which it was drawn, and predicts the
state of row i + 1. Two layouts, named and shaped as SGLang loads them (`state_dict()` is the exported file):
EAGLE-1/2 (https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858) takes the final state and
speaks through the target's own head; its layer has no input norm, and `fc` has a bias because SGLang
declares one and leaves it random if the file lacks it. EAGLE-3 (https://arxiv.org/abs/2503.01840) takes
three inner states and has a head of its own over a reduced vocabulary.

Legend: b sequences, s rows, h hidden, f features of a row, n heads, g query groups, d head dim, v vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from megatron_tlt.models.drafter_layers import DraftLayer, Past, Rows, rotary_angles

_ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Sizes of a drafter. Example: DrafterConfig.for_target(config_of_the_target_as_json)."""

    layout: Literal["eagle", "eagle3"] = "eagle"
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float = 1e-6
    rotary_base: float = 10000.0
    draft_vocab_size: int = 0
    """Tokens that an EAGLE-3 head can draft; 0: all (EAGLE-1/2 always drafts all)."""
    feature_layers: tuple[int, ...] = ()
    """EAGLE-3: the three target layers whose input states are the features."""

    def __post_init__(self) -> None:
        if self.layout not in _ARCHITECTURES:
            raise ValueError(f"layout={self.layout!r} is not one of {sorted(_ARCHITECTURES)}")
        if len(self.feature_layers) != (3 if self.layout == "eagle3" else 0):
            raise ValueError(
                f"layout={self.layout!r} with feature_layers={self.feature_layers}: eagle3 takes three "
                "layers, eagle none"
            )
        if self.head_dim % 2 or self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"head_dim={self.head_dim} must be even and num_attention_heads="
                f"{self.num_attention_heads} a multiple of num_query_groups={self.num_query_groups}"
            )
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is outside 0 to vocab_size={self.vocab_size}"
            )

    @property
    def feature_size(self) -> int:
        """Numbers of one row's features."""
        return self.hidden_size * (3 if self.layout == "eagle3" else 1)

    @property
    def head_size(self) -> int:
        """Tokens that the drafter's own head knows (EAGLE-3)."""
        return self.draft_vocab_size or self.vocab_size

    @staticmethod
    def for_target(
        target: Mapping[str, Any], *, layout: Literal["eagle", "eagle3"] = "eagle", draft_vocab_size: int = 0
    ) -> "DrafterConfig":
        """A drafter shaped like one layer of the target with this Hugging Face `config.json`."""
        hidden = target.get("hidden_size") or target["n_embd"]
        heads = target.get("num_attention_heads") or target["n_head"]
        layers = target.get("num_hidden_layers") or target["n_layer"]
        rope = target.get("rope_parameters") or {}
        wide = target.get("n_inner") or 8 * hidden // 3 // 32 * 32 or 32
        return DrafterConfig(
            layout=layout, hidden_size=hidden, ffn_hidden_size=target.get("intermediate_size") or wide,
            num_attention_heads=heads, num_query_groups=target.get("num_key_value_heads") or heads,
            head_dim=target.get("head_dim") or hidden // heads, vocab_size=target["vocab_size"],
            max_position_embeddings=target.get("max_position_embeddings") or target["n_positions"],
            norm_epsilon=target.get("rms_norm_eps", 1e-6),
            rotary_base=float(rope.get("rope_theta", target.get("rope_theta") or 10000.0)),
            draft_vocab_size=draft_vocab_size if layout == "eagle3" else 0,
            feature_layers=default_feature_layers(layers) if layout == "eagle3" else (),
        )  # fmt: skip

    def to_hf(self) -> dict[str, Any]:
        """`config.json` as SGLang reads it. Its layer ids name the layer whose *output* is the feature."""
        config = {
            "architectures": [_ARCHITECTURES[self.layout]], "model_type": "llama",
            "num_hidden_layers": 1, "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_hidden_size, "hidden_act": "silu",
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_query_groups, "head_dim": self.head_dim,
            "vocab_size": self.vocab_size, "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.norm_epsilon, "rope_theta": self.rotary_base,
            "tie_word_embeddings": False, "attention_bias": False,
        }  # fmt: skip
        if self.layout == "eagle3":
            ids = [layer - 1 for layer in self.feature_layers]
            config |= {"draft_vocab_size": self.head_size, "target_hidden_size": self.hidden_size}
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
        return config

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "DrafterConfig":
        """Read what `to_hf` writes. Raises ValueError for another architecture."""
        names = {v: k for k, v in _ARCHITECTURES.items()}
        name = next(iter(config.get("architectures") or [""]))
        if name not in names:
            raise ValueError(f"architectures={name!r} is no drafter: known are {sorted(names)}")
        ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", ())
        heads = config["num_attention_heads"]
        return DrafterConfig(
            layout=names[name], hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"], num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"], norm_epsilon=config["rms_norm_eps"],
            max_position_embeddings=config["max_position_embeddings"],
            rotary_base=float(config.get("rope_theta", 10000.0)),
            draft_vocab_size=config.get("draft_vocab_size", 0),
            feature_layers=tuple(i + 1 for i in ids),
        )  # fmt: skip


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's choice: input states of layers 2, L/2 and L-3. Raises ValueError below 7 layers."""
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"a target of {num_layers} layers has no three distinct feature layers {layers}: give "
            "feature_layers yourself, or use layout eagle"
        )
    return layers


class Drafter(nn.Module):
    """The trainable layer. `share` gives it the target's embedding and head, which stay the target's.

    EAGLE-3 keeps `d2t` (offset from draft token to target token) and `t2d` (bool `[v]`) as buffers.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        eagle3, size = config.layout == "eagle3", config.hidden_size
        self.fc = nn.Linear(config.feature_size if eagle3 else 2 * size, size, bias=not eagle3)
        if eagle3:
            self.midlayer = DraftLayer(config)
            self.norm = nn.RMSNorm(size, eps=config.norm_epsilon)
            self.lm_head = nn.Linear(size, config.head_size, bias=False)
            self.register_buffer("d2t", torch.zeros(config.head_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            self.draft_tokens(range(config.head_size))
        else:
            self.layers = nn.ModuleList([DraftLayer(config)])
        self.embedding: torch.Tensor | None = None
        self.head: torch.Tensor | None = None
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if eagle3 else 1 / math.sqrt(2 * size))
        if not eagle3:
            nn.init.zeros_(self.fc.bias)

    def share(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Use the target's `[v, h]` tables, without copying or training them."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, table in (("embedding", embedding), ("head", head)):
            if tuple(table.shape) != expected:
                raise ValueError(
                    f"the target's {name} is {tuple(table.shape)}, the drafter wants {expected}"
                )
        self.embedding, self.head = embedding.detach(), head.detach()

    def draft_tokens(self, tokens: Sequence[int]) -> None:
        """EAGLE-3: the reduced vocabulary, ascending target tokens."""
        chosen = torch.tensor(sorted(set(tokens)))
        if len(chosen) != self.config.head_size:
            raise ValueError(f"{len(chosen)} draft tokens for draft_vocab_size={self.config.head_size}")
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()[chosen] = True

    def passes(
        self, tokens: torch.Tensor, features: torch.Tensor, *, count: int, rows: Rows | None = None
    ) -> list[torch.Tensor]:
        """Training-time test: `count` outputs `[b, s, h]`, pass j as the engine's draft step j would see it.

        tokens `[b, s]`, features `[b, s, f]`; `rows` says how sequences are packed (default: one a line). In
        pass j, row i replaces the target's state by pass j-1's output at row i-1, and attends to pass 0 up
        to row i-j, then to pass m at row i-j+m (EAGLE-3, section 3.1; HASS). Rows below j of a sequence
        mean nothing in pass j.
        """
        embedded = F.embedding(tokens, self.embedding).to(self.fc.weight.dtype)
        rows = rows or Rows.unpacked(tokens)
        table = rotary_angles(
            rows.positions, head_dim=self.config.head_dim, base=self.config.rotary_base
        )
        past: Past = []
        outputs: list[torch.Tensor] = []
        state = features
        for index in range(count):
            joined = self._join(embedded, state, first=index == 0)
            outputs.append(self._layer(joined, table, past, rows))
            state = F.pad(outputs[-1], (0, 0, 1, 0))[:, :-1]
        return outputs

    def _join(self, embedded: torch.Tensor, state: torch.Tensor, *, first: bool) -> torch.Tensor:
        """The layer's input: `[b, s, h]`, or for EAGLE-3 `[b, s, 2h]` (embedding, state)."""
        state = state.to(embedded.dtype)
        if self.config.layout == "eagle":
            return self.fc(torch.cat((embedded, state), -1))
        return torch.cat((embedded, self.fc(state) if first else state), -1)

    def _layer(self, x: torch.Tensor, table: torch.Tensor, past: Past, rows: Rows) -> torch.Tensor:
        layer = self.midlayer if self.config.layout == "eagle3" else self.layers[0]
        return layer(x, table, past, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., h]` to `[..., v]`, or for EAGLE-3 to its own draft vocabulary."""
        if self.config.layout == "eagle3":
            return self.lm_head(self.norm(hidden))
        return F.linear(hidden, self.head.to(hidden.dtype))

    def target_logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits `[..., v]` of its final states (after its final norm)."""
        return F.linear(last_hidden.to(self.fc.weight.dtype), self.head.to(self.fc.weight.dtype))

    def target_tokens(self, draft: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary to the target's."""
        return draft + self.d2t[draft] if self.config.layout == "eagle3" else draft
