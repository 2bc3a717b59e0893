"""transformers' own forward pass over a model folder, one layer's float32 weights in memory at a time.

This is the yardstick of every conversion. The model is built without storage; hooks read a module's
weights when it is entered and drop them when it is left, so that a 70B model is checked in the memory of
its largest layer.
"""

from pathlib import Path

from megatron_tlt.models.hf import Weights
from megatron_tlt.models.hf_config import architecture_of_hf
from megatron_tlt.models.hf_files import read_hf_config, read_safetensors_dir

import torch


def reference_logits(
    folder: str | Path, tokens: torch.Tensor, *, rounded_to: torch.dtype | None = None
) -> torch.Tensor:
    """Logits `[b, s, v]`, float32, of transformers' model in `folder` for tokens `[b, s]`, on the CPU.

    Weights are first rounded to `rounded_to`, where the conversion rounds them too.
    """
    import transformers  # 5 s to import, and only the verification needs it

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        ).eval()
    _rebuild_rotary(model)
    weights = read_safetensors_dir(folder, architecture_of_hf(read_hf_config(folder)))
    names = {id(p): n for n, p in model.named_parameters()}  # tied ones go under the first name
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            _stream_weights(module, weights, {id(p): names[id(p)] for p in own}, rounded_to)
    with torch.no_grad():
        return model(tokens.cpu(), use_cache=False).logits


def _rebuild_rotary(model: torch.nn.Module) -> None:
    """Rotary tables are computed, not loaded: build those modules again, with storage."""
    for name, module in list(model.named_modules()):
        if next(iter(module.buffers(recurse=False)), None) is not None:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], type(module)(config=model.config))


def _stream_weights(
    module: torch.nn.Module,
    weights: Weights,
    names: dict[int, str],
    rounded_to: torch.dtype | None,
) -> None:
    empty = {n: p for n, p in module.named_parameters(recurse=False)}

    def load(*_: object) -> None:
        for attribute, param in empty.items():
            values = weights[names[id(param)]][:].to(rounded_to).float()
            setattr(module, attribute, torch.nn.Parameter(values, requires_grad=False))

    def drop(*_: object) -> None:
        for attribute, param in empty.items():
            setattr(module, attribute, param)

    module.register_forward_pre_hook(load)
    module.register_forward_hook(drop)
