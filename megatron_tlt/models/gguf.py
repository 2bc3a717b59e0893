"""GGUF files with the Llama layout -> Hugging Face names, configuration and tokenizer.

The one importer of the `gguf` package (optional extra), and only when a file is opened. Weights are
dequantised one tensor at a time, to float32. llama.cpp stores queries and keys with the two halves of
each head interleaved, for its rotary embedding turns neighbouring elements; Hugging Face's turns element
i with i + d/2: see `unpermute`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
# tokenizer.ggml.pre -> whether digits are single tokens before the byte-level split.
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False}
_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4  # tokenizer.ggml.token_type


def unpermute(weight: torch.Tensor, *, num_heads: int) -> torch.Tensor:
    """llama.cpp's row order of a query or key weight `[n d, h]` -> Hugging Face's.

    Inside a head llama.cpp's rows are (0, d/2, 1, d/2 + 1, ...); the inverse of `permute` in llama.cpp's
    convert_hf_to_gguf.py.
    """
    pairs = weight.unflatten(0, (num_heads, -1, 2))  # [n, d/2, 2, h]
    return pairs.transpose(1, 2).reshape(weight.shape)


class GgufModel(Mapping):
    """Hugging Face name -> float32 tensor, dequantised when asked for.

    Raises ValueError for a GGUF file of another architecture or with tensors that Llama has not.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise ValueError(f"{path} is no file: give a .gguf file")
        import gguf  # optional extra

        self._dequantize = gguf.quants.dequantize
        self._reader = gguf.GGUFReader(path)
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path}: general.architecture={architecture!r}; only 'llama' is read")
        self._tensors = {_hf_name(t.name, path): t for t in self._reader.tensors}

    def field(self, name: str, default: object = None) -> object:
        """A metadata value. Raises ValueError when it is absent and no default is given."""
        found = self._reader.get_field(name)
        if found is None and default is None:
            raise ValueError(f"the GGUF file has no field {name}")
        return default if found is None else found.contents()

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        values = self._dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        heads = {
            "q_proj": self.field("llama.attention.head_count"),
            "k_proj": self.field("llama.attention.head_count_kv"),
        }.get(name.split(".")[-2])
        return weight if heads is None else unpermute(weight, num_heads=heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def hf_config(self) -> dict[str, object]:
        """The `config.json`. Raises ValueError for what a plain Llama has not (experts, scaling)."""
        self._refuse_unsupported()
        heads = self.field("llama.attention.head_count")
        hidden = self.field("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(self._tensors["model.embed_tokens.weight"].shape[1]),  # GGUF: [h, v]
            "num_hidden_layers": self.field("llama.block_count"),
            "hidden_size": hidden,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.field("llama.attention.head_count_kv", heads),
            "head_dim": self.field("llama.attention.key_length", hidden // heads),
            "max_position_embeddings": self.field("llama.context_length"),
            "rope_theta": float(self.field("llama.rope.freq_base", 10000.0)),
            "rope_scaling": None,
            # Stored as float32: take the shortest decimal that is that number (1e-05).
            "rms_norm_eps": float(str(np.float32(self._epsilon()))),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "lm_head.weight" not in self,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "torch_dtype": "float32",
        }

    def _epsilon(self) -> float:
        return self.field("llama.attention.layer_norm_rms_epsilon")

    def _refuse_unsupported(self) -> None:
        d = self.field("llama.embedding_length") // self.field("llama.attention.head_count")
        d = self.field("llama.attention.key_length", d)
        for name, plain in (
            ("llama.expert_count", 0),
            ("llama.rope.scaling.type", "none"),
            ("llama.rope.dimension_count", d),
            ("llama.attention.value_length", d),
        ):
            if self.field(name, plain) != plain:
                raise ValueError(f"GGUF {name}={self.field(name)!r} is not supported: only {plain!r}")

    def tokenizer_files(self) -> dict[str, bytes]:
        """`tokenizer.json` and `tokenizer_config.json`, as transformers loads them."""
        tokenizer = self.tokenizer()
        tokens = self.field("tokenizer.ggml.tokens")
        settings: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        }
        for ours, theirs in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        ):
            number = self.field(f"tokenizer.ggml.{theirs}", -1)
            if number >= 0:
                settings[ours] = tokens[number]
        template = self.field("tokenizer.chat_template", "")
        if template:
            settings["chat_template"] = template
        return {
            "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": (json.dumps(settings, indent=1) + "\n").encode(),
        }

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Byte-level BPE out of the file's tokens and merges.

        Raises ValueError for another kind of tokenizer or an unknown way of splitting before it.
        """
        kind, pre = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or pre not in _SINGLE_DIGITS:
            raise ValueError(
                f"GGUF tokenizer model {kind!r} with pre-tokenizer {pre!r} is not supported: only "
                f"'gpt2' with {sorted(_SINGLE_DIGITS)}"
            )
        tokens = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        tokenizer = tokenizers.Tokenizer(bpe)
        split = [pre_tokenizers.Digits(individual_digits=True)] if _SINGLE_DIGITS[pre] else []
        split.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.field("tokenizer.ggml.token_type")
        special = [t for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL_TOKEN]
        plain = [t for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED_TOKEN]
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in plain])
        return tokenizer


def _hf_name(name: str, path: str | Path) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    found = _LAYER.fullmatch(name)
    if found is None or found.group(2) not in _LAYER_TENSORS:
        raise ValueError(f"{path} has the tensor {name}, which a plain Llama has not")
    return f"model.layers.{found.group(1)}.{_LAYER_TENSORS[found.group(2)]}.weight"
