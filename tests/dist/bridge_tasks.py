"""Conversions as tasks for gloo workers, which import no more than these."""

from megatron_tlt.bridge.convert import hf_to_megatron, megatron_to_hf
from megatron_tlt.bridge.load import load_hf_folder
from megatron_tlt.models.hf_config import architecture_of_model
from megatron_tlt.models.hf_stream import export_hf, import_hf
from megatron_tlt.parallel import ParallelConfig, init_parallel

import torch


def layout(tp: int, pp: int):
    torch.set_num_threads(1)
    config = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    return init_parallel(config, seed=1)


def round_trip(source, root, tp: int, pp: int) -> tuple[float, float]:
    parallel = layout(tp, pp)
    there = hf_to_megatron(source, root / "checkpoint", parallel)
    back = megatron_to_hf(root / "checkpoint", root / "hf", parallel, max_shard_bytes=100_000)
    assert back.num_parameters == there.num_parameters
    return there.max_logit_difference, back.max_logit_difference


def stream_in_memory(source) -> bool:
    """Export on every rank, import what came out, export again; True when nothing changed."""
    parallel = layout(2, 2)
    loaded = load_hf_folder(source, parallel)
    architecture = architecture_of_model(loaded.model)
    small = dict(architecture=architecture, bucket_bytes=20_000)
    first = dict(export_hf(loaded.chunks, parallel, **small))
    with torch.no_grad():
        for chunk in loaded.chunks:
            for parameter in chunk.parameters():
                parameter.zero_()
    import_hf(loaded.chunks, parallel, first, architecture=architecture)
    second = dict(export_hf(loaded.chunks, parallel, **small))
    assert list(first) == list(second)
    return all(torch.equal(first[name], second[name]) for name in first)


def refusal(source, root) -> str:
    parallel = layout(2, 2)
    try:
        hf_to_megatron(source, root / "checkpoint", parallel)
    except ValueError as error:
        return str(error)
    return ""
