"""EAGLE and EAGLE-3 folders as SGLang loads them, written from a `Drafter` and read back, all of it checked.

SGLang is lenient where it hurts: it leaves `fc.bias` random if the file lacks it, takes rope_theta 10000
where `config.json` says nothing, and indexes past the drafter's positions. So a folder is complete here, or
refused.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.models.hf_config import rotary_fields
from megatron_tlt.models.hf_files import SafetensorsFolder, read_hf_config, write_safetensors_dir

import torch

_TABLES = ("embed_tokens.weight",)
"""The target's: some files carry a copy, which neither SGLang nor we use."""
_INTEGERS = {"d2t": torch.int64, "t2d": torch.bool}
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1}
_NEEDED = (
    "architectures", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


def draft_tensors(
    drafter: Drafter, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The drafter's own tensors under SGLang's names, on the host, as `dtype` (default: their own)."""
    for name, tensor in drafter.state_dict().items():
        kind = _INTEGERS.get(name, dtype or tensor.dtype)
        yield name, tensor.detach().to(device="cpu", dtype=kind).contiguous()


def check_fits(config: DrafterConfig, target: Mapping[str, Any]) -> None:
    """Whether a drafter can serve the target with this `config.json`.

    Raises ValueError that names every field that does not fit.
    """
    layers = target.get("num_hidden_layers") or target["n_layer"]
    positions = target.get("max_position_embeddings") or target["n_positions"]
    wrong = [
        f"{name} is {ours} in the drafter and {theirs} in the target"
        for name, ours, theirs in (
            ("hidden_size", config.hidden_size, target.get("hidden_size") or target["n_embd"]),
            ("vocab_size", config.vocab_size, target["vocab_size"]),
        )
        if ours != theirs
    ]
    if config.max_position_embeddings < positions:
        wrong.append(
            f"max_position_embeddings={config.max_position_embeddings} is less than the target's {positions}"
        )
    if not all(0 <= layer < layers for layer in config.feature_layers):
        wrong.append(f"feature layers {config.feature_layers} are not all in a target of {layers} layers")
    if "n_positions" not in target:  # GPT-2 has no rotary positions to compare with
        base = float(rotary_fields(target)["rope_theta"])
        if config.rotary_base != base:
            wrong.append(f"rope_theta is {config.rotary_base} in the drafter and {base} in the target")
    if wrong:
        raise ValueError(f"the drafter does not fit the target: {'; '.join(wrong)}")


def export_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    target: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write `folder` (new; published by rename) for `speculative_draft_model_path`.

    `target`: the target's `config.json`; `files`: its tokenizer's, which SGLang does not need. Raises
    ValueError when the drafter does not fit the target or holds values that are not finite.
    """
    check_fits(drafter.config, target)
    tensors = dict(draft_tensors(drafter, dtype=dtype))
    _check_tensors(drafter.config, tensors, where="the drafter")
    kind = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    config = drafter.config.to_hf() | {"torch_dtype": kind}
    write_safetensors_dir(tensors.items(), folder, config=config, files=files or {})


def read_drafter_config(folder: str | Path) -> DrafterConfig:
    """`config.json` of a drafter's folder. Raises ValueError for what we, or SGLang, would misread."""
    config = read_hf_config(folder)
    missing = [name for name in _NEEDED if config.get(name) is None]
    if missing:
        raise ValueError(f"{folder}/config.json lacks {missing}")
    for name, only in _FIXED.items():
        if config.get(name, only) != only:
            raise ValueError(f"{folder}/config.json: {name}={config[name]!r}; only {only!r} is supported")
    if config.get("rope_theta") is None and not config.get("rope_parameters"):
        raise ValueError(
            f"{folder}/config.json has no rope_theta: SGLang would take 10000; write the one it was trained "
            "with"
        )
    rope = rotary_fields(config)
    if rope["rope_type"] != "default":
        raise ValueError(
            f"{folder}/config.json: rope_type={rope['rope_type']!r}; only 'default' is supported"
        )
    return DrafterConfig.from_hf(config | {"rope_theta": rope["rope_theta"]})


def import_drafter(folder: str | Path, *, target: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter in `folder`, in its own type; `share` it the target's tables before use.

    Raises ValueError for a folder that is incomplete, of another layout, or does not fit `target`.
    """
    config = read_drafter_config(folder)
    if target is not None:
        check_fits(config, target)
    found = SafetensorsFolder(folder)
    tensors = {
        name.removeprefix("model."): found[name][...]
        for name in found
        if name.removeprefix("model.") not in _TABLES
    }
    _check_tensors(config, tensors, where=str(folder))
    drafter = Drafter(config).to(tensors["fc.weight"].dtype)
    drafter.load_state_dict(tensors)
    return drafter


def _check_tensors(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Names, shapes, finite values, and for EAGLE-3 a vocabulary that both its tables agree on."""
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in Drafter(config).state_dict().items()}
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"{where} is no {config.layout} drafter of this config.json: missing {missing}, unknown {unknown}"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise ValueError(f"{where}: {name} is {tuple(tensor.shape)}, config.json wants {wanted[name]}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{where}: {name} has values that are not finite")
    if config.layout == "eagle3":
        chosen = tensors["d2t"] + torch.arange(config.head_size)
        if not torch.equal(tensors["t2d"].nonzero().flatten(), chosen):
            raise ValueError(f"{where}: d2t and t2d name different draft vocabularies")
