"""The three conversions. Each verifies its result against transformers before anything is published.

`hf_to_megatron` and `megatron_to_hf` run on one process or under torchrun with any TP and PP.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.bridge.load import LoadedModel, dtype_name, load_hf_folder, load_megatron
from megatron_tlt.bridge.tokenizer_export import export_tokenizer
from megatron_tlt.bridge.verify import on_first_rank, verify_config, verify_logits
from megatron_tlt.data.tokenizer import TokenizerConfig, build_tokenizer
from megatron_tlt.files import delete_folder, publish_folder, write_text
from megatron_tlt.models.gguf import GgufModel
from megatron_tlt.models.gpt import model_identity
from megatron_tlt.models.hf_config import architecture_of_model, hf_config_from_model
from megatron_tlt.models.hf_files import SafetensorsWriter, read_tokenizer_files
from megatron_tlt.models.hf_stream import count_parameters, export_hf
from megatron_tlt.parallel import Parallel
from megatron_tlt.train.checkpoint import TrainState, save_checkpoint

import torch
import torch.distributed as dist
import yaml
from tqdm import tqdm


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What a conversion found. Example: max_logit_difference 1.2e-05, seconds 30.1, peak_gib 4.9."""

    folder: str
    num_parameters: int
    max_logit_difference: float
    """To transformers, float32, over all positions of the check."""
    checked_fields: dict[str, object]
    seconds: float
    peak_gib: float
    """Largest peak memory of any rank."""


def _report(
    folder: Path, loaded: LoadedModel, parallel: Parallel, *, checks: tuple, start: float
) -> Conversion:
    """Collective over the world; `checks` are (compared fields, largest difference of logits)."""
    architecture = architecture_of_model(loaded.model)
    peak = torch.tensor(device.max_memory_bytes() / 2**30, device=device.device())
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return Conversion(
        folder=str(folder),
        num_parameters=count_parameters(loaded.chunks, parallel, architecture=architecture),
        max_logit_difference=checks[1],
        checked_fields=checks[0],
        seconds=time.perf_counter() - start,
        peak_gib=float(peak),
    )


def hf_to_megatron(
    source: str | Path, save: str | Path, parallel: Parallel, *, dtype: torch.dtype | None = None
) -> Conversion:
    """A Hugging Face folder -> `save`/iter_0000000, a copy of the tokenizer, and `save`/config.yaml.

    The latter is the part of a training configuration that goes on from these weights. `dtype` None keeps
    the file's. Collective over the world. Raises ValueError when the model is not supported, `save` holds
    something, or configuration or logits are not transformers'.
    """
    start, save = time.perf_counter(), Path(save)
    if save.exists() and any(save.iterdir()):
        raise ValueError(f"{save} is not empty: choose another folder or delete it first")
    loaded = load_hf_folder(source, parallel, dtype=dtype)
    fields = on_first_rank(
        lambda: verify_config(loaded.model, source, vocab_size=loaded.vocab_size)
    )
    difference = verify_logits(loaded.chunks, parallel, source, rounded_to=dtype)
    tokenizer = _keep_tokenizer(source, save, loaded)
    config = {"model": asdict(loaded.model), "tokenizer": asdict(tokenizer)}
    state = TrainState(
        model=model_identity(loaded.model),
        tokenizer=build_tokenizer(tokenizer).identity(),
        config=config | {"source": str(source), "vocab_size": loaded.vocab_size},
    )
    folder = save_checkpoint(save, state, loaded.chunks, None, groups=parallel.groups)
    if parallel.rank == 0:
        config["checkpoint"] = {"load": str(save.absolute()), "finetune": True}
        write_text(save / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    dist.barrier()
    return _report(folder, loaded, parallel, checks=(fields, difference), start=start)


def _keep_tokenizer(source: str | Path, save: Path, loaded: LoadedModel) -> TokenizerConfig:
    """Copy the tokenizer's files to `save`/tokenizer; the configuration that reads the copy.

    A folder without tokenizer gets a NullTokenizer, whose end of document is the last id.
    """
    if loaded.tokenizer is None:
        return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=loaded.vocab_size - 1)
    final, partial = save / "tokenizer", save / ".tokenizer.partial"
    if dist.get_rank() == 0:
        delete_folder(partial)
        partial.mkdir(parents=True)
        for name, content in read_tokenizer_files(source).items():
            (partial / name).write_bytes(content)
        publish_folder(partial, final)
    dist.barrier()
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(final.absolute()))


def megatron_to_hf(
    load: str | Path,
    save: str | Path,
    parallel: Parallel,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: TokenizerConfig | None = None,
    max_shard_bytes: int = 2 * 1000**3,
) -> Conversion:
    """A checkpoint -> a Hugging Face folder with safetensors shards, config and tokenizer.

    `dtype` None keeps the checkpoint's; `tokenizer` None takes the one that the checkpoint names. The
    folder appears under its name only after transformers has given the same logits from it. Collective
    over the world. Raises ValueError when no Hugging Face architecture can hold the model, or `save`
    exists.
    """
    start = time.perf_counter()
    loaded = load_megatron(load, parallel, tokenizer=tokenizer)
    architecture = architecture_of_model(loaded.model)
    weights_dtype = next(loaded.chunks[0].parameters()).dtype if dtype is None else dtype
    config = _hf_config(loaded, weights_dtype)
    files = on_first_rank(lambda: _tokenizer_files(loaded))
    pairs = export_hf(
        loaded.chunks, parallel, architecture=architecture, dtype=dtype, receivers="first"
    )
    on_first_rank(lambda: SafetensorsWriter.check_free(save))
    writer = None
    if parallel.rank == 0:
        writer = SafetensorsWriter(save, max_shard_bytes=max_shard_bytes)
        writer.write(tqdm(pairs, desc="exporting", unit="tensor", delay=2.0))
        writer.finish(config, files)
    for _ in pairs:
        raise AssertionError("only rank 0 receives tensors")
    partial = SafetensorsWriter.partial_folder(save)
    fields = on_first_rank(
        lambda: verify_config(loaded.model, partial, vocab_size=loaded.vocab_size)
    )
    if dtype is not None:
        for chunk in loaded.chunks:
            chunk.to(dtype)
    difference = verify_logits(loaded.chunks, parallel, partial)
    if writer is not None:
        writer.publish()
    dist.barrier()
    return _report(Path(save), loaded, parallel, checks=(fields, difference), start=start)


def _tokenizer_files(loaded: LoadedModel) -> dict[str, bytes]:
    if loaded.tokenizer is None or loaded.tokenizer.tokenizer_type == "NullTokenizer":
        return {}
    return export_tokenizer(loaded.tokenizer)


def _hf_config(loaded: LoadedModel, dtype: torch.dtype) -> dict[str, object]:
    ids = build_tokenizer(loaded.tokenizer) if loaded.tokenizer else None
    return hf_config_from_model(
        loaded.model,
        vocab_size=loaded.vocab_size,
        torch_dtype=dtype_name(dtype),
        bos_token_id=ids.bos if ids else None,
        eos_token_id=ids.eos if ids else None,
        pad_token_id=ids.pad if ids else None,
    )


def gguf_to_hf(source: str | Path, save: str | Path, parallel: Parallel) -> Conversion:
    """A GGUF file with the Llama layout -> a Hugging Face folder in float32.

    The written folder is opened as a model and its logits compared with transformers', then it is
    published. For one process. Raises ValueError for a file that is no plain Llama.
    """
    start = time.perf_counter()
    model = GgufModel(source)
    writer = SafetensorsWriter(save)
    writer.write((name, model[name]) for name in model)
    writer.finish(model.hf_config(), model.tokenizer_files())
    loaded = load_hf_folder(writer.partial, parallel)
    fields = verify_config(loaded.model, writer.partial, vocab_size=loaded.vocab_size)
    difference = verify_logits(loaded.chunks, parallel, writer.partial)
    writer.publish()
    return _report(Path(save), loaded, parallel, checks=(fields, difference), start=start)
