"""Streaming between a Megatron model cut over TP and PP and whole Hugging Face tensors.

Used by conversion and by the road from trainer to rollout engine: no disk, no whole model. Every rank of a
model replica iterates in lockstep; a bucket of parameters is gathered over the TP ranks of the stage that
owns it, then handed to the other stages.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from megatron_tlt import device
from megatron_tlt.models.gpt import GPT
from megatron_tlt.models.hf import (
    Architecture,
    Geometry,
    Weights,
    hf_shapes,
    place_of,
    read_part,
    whole_tensors,
)
from megatron_tlt.models.initialize import global_parameters
from megatron_tlt.parallel import Parallel

import torch
import torch.distributed as dist
from tqdm import tqdm

Receivers = Literal["all", "first"]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One parameter in export order. Example: PlanEntry("decoder.final_layernorm.weight", (64,), 1)."""

    name: str
    local_shape: tuple[int, ...]
    """Shape of a TP part."""
    stage: int
    """Pipeline rank that owns it."""

    @property
    def numel(self) -> int:
        return torch.Size(self.local_shape).numel()


def geometry_of(chunk: GPT) -> Geometry:
    return Geometry(
        num_attention_heads=chunk.config.num_attention_heads,
        num_query_groups=chunk.config.num_query_groups,
        kv_channels=chunk.config.kv_channels,
        vocab_size=chunk.true_vocab_size,
    )


def plan_export(chunks: list[GPT], parallel: Parallel) -> list[PlanEntry]:
    """All parameters of the model, embedding first, head last; the same list on every rank.

    Collective over the pipeline group, and worth keeping: the plan of a model does not change. The tied
    copy of the embedding on the last stage is left out.
    """
    mine = [(n, tuple(p.shape)) for chunk in chunks for n, p in global_parameters(chunk)]
    stages: list = [None] * parallel.groups.pp.size()
    dist.all_gather_object(stages, mine, group=parallel.groups.pp)
    entries: dict[str, PlanEntry] = {}
    for stage, parameters in enumerate(stages):
        for name, shape in parameters:
            entries.setdefault(name, PlanEntry(name, shape, stage))
    return sorted(entries.values(), key=lambda entry: _order(entry.name))


def count_parameters(
    chunks: list[GPT], parallel: Parallel, *, architecture: Architecture
) -> int:
    """Parameters of the whole model, vocabulary padding left out. Collective over the pipeline group."""
    tp_size, geometry = parallel.groups.tp.size(), geometry_of(chunks[0])
    return sum(
        torch.Size(shape).numel()
        for entry in plan_export(chunks, parallel)
        for shape in hf_shapes(
            place_of(architecture, entry.name), entry.local_shape, geometry, tp_size=tp_size
        )
    )


def _order(name: str) -> tuple[int, int]:
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    if found:
        return (1, int(found.group(1)))
    return (0, 0) if name.startswith("embedding.") else (2, 0)


def export_hf(
    chunks: list[GPT],
    parallel: Parallel,
    *,
    architecture: Architecture,
    dtype: torch.dtype | None = None,
    receivers: Receivers = "all",
    bucket_bytes: int = 256 * 2**20,
    plan: list[PlanEntry] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors under Hugging Face names, in the device's memory, cut to the true vocabulary.

    Every rank must exhaust the iterator: its collectives run between the yields. With receivers="first"
    rank 0 alone gets tensors, the others iterate over nothing. A rank holds the bucket that is being
    handed out (at most `bucket_bytes` of whole tensors, or one larger parameter) beside its own part.
    `dtype` casts before the gathering; None keeps the parameters' own. The tensors are copies.
    """
    if receivers == "first" and parallel.dp_rank != 0:
        return
    plan = plan_export(chunks, parallel) if plan is None else plan
    parameters: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            parameters.setdefault(name, param)
    dtype = next(chunks[0].parameters()).dtype if dtype is None else dtype
    geometry, tp_size = geometry_of(chunks[0]), parallel.groups.tp.size()
    limit = bucket_bytes // (dtype.itemsize * tp_size)
    for bucket in _buckets(plan, limit):
        pieces = _gather(bucket, parameters, parallel, dtype=dtype, receivers=receivers)
        if pieces is None:
            continue
        start = 0
        for entry in bucket:
            part = pieces[:, start : start + entry.numel].view(tp_size, *entry.local_shape)
            start += entry.numel
            yield from whole_tensors(place_of(architecture, entry.name), part, geometry)


def _buckets(plan: list[PlanEntry], max_local_numel: int) -> Iterator[list[PlanEntry]]:
    """Runs of consecutive entries of one stage, up to `max_local_numel` elements a TP rank."""
    for _, run in groupby(plan, key=lambda entry: entry.stage):
        bucket: list[PlanEntry] = []
        size = 0
        for entry in run:
            if bucket and size + entry.numel > max_local_numel:
                yield bucket
                bucket, size = [], 0
            bucket.append(entry)
            size += entry.numel
        yield bucket


def _gather(
    bucket: list[PlanEntry],
    parameters: dict[str, torch.nn.Parameter],
    parallel: Parallel,
    *,
    dtype: torch.dtype,
    receivers: Receivers,
) -> torch.Tensor | None:
    """`[t, numel]`: the bucket's parts of all TP ranks, on the receiving ranks; None elsewhere."""
    groups, stage = parallel.groups, bucket[0].stage
    tp_size, size = groups.tp.size(), sum(entry.numel for entry in bucket)
    pieces = None
    if parallel.pp_rank == stage:
        local = torch.cat([parameters[e.name].detach().to(dtype).flatten() for e in bucket])
        pieces = local[None]
        if tp_size > 1:
            pieces = local.new_empty(tp_size, size)
            dist.all_gather_into_tensor(pieces.view(-1), local, group=groups.tp)
    if receivers == "all":
        if groups.pp.size() > 1:
            if pieces is None:
                pieces = torch.empty(tp_size, size, dtype=dtype, device=device.device())
            dist.broadcast(pieces, group=groups.pp, group_src=stage)
        return pieces
    if parallel.tp_rank != 0:
        return None
    if stage != 0 and parallel.pp_rank == stage:
        dist.send(pieces, group=groups.pp, group_dst=0)
    if stage != 0 and parallel.pp_rank == 0:
        pieces = torch.empty(tp_size, size, dtype=dtype, device=device.device())
        dist.recv(pieces, group=groups.pp, group_src=stage)
    return pieces if parallel.pp_rank == 0 else None


def import_hf(
    chunks: list[GPT], parallel: Parallel, weights: Weights, *, architecture: Architecture
) -> None:
    """Fill this rank's parameters from Hugging Face tensors, reading only the rows that it needs.

    `weights` is a mapping of lazy tensors (a dict of tensors is one). Rows of padding become zero. Raises
    ValueError when tensors are missing or unknown, before anything is written, and when one has another
    shape than the model's. Collective over the pipeline group.
    """
    plan = plan_export(chunks, parallel)
    check_names(plan, weights, architecture=architecture)
    geometry = geometry_of(chunks[0])
    for chunk in chunks:
        tensors = list(global_parameters(chunk))
        quiet = parallel.rank != 0
        for name, param in tqdm(tensors, desc="reading", unit="tensor", delay=2.0, disable=quiet):
            part = read_part(
                place_of(architecture, name),
                weights,
                tuple(param.shape),
                geometry,
                tp_rank=parallel.tp_rank,
                tp_size=parallel.groups.tp.size(),
            )
            with torch.no_grad():
                param.copy_(part)


def check_names(plan: list[PlanEntry], weights: Weights, *, architecture: Architecture) -> None:
    """Raise ValueError unless `weights` holds the model's tensors and no others."""
    expected = {hf for entry in plan for hf in place_of(architecture, entry.name).hf}
    found = {name for name in weights if not re.fullmatch(architecture.ignored, name)}
    # Hub files of tied models often repeat the embedding as the head.
    tied = all(entry.name != "output_layer.weight" for entry in plan)
    unknown = sorted(found - expected - ({"lm_head.weight"} if tied else set()))
    missing = sorted(expected - found)
    if missing or unknown:
        raise ValueError(
            f"the weights are not those of this {architecture.name}: {len(missing)} missing "
            f"{missing[:8]}, {len(unknown)} unknown {unknown[:8]}"
        )
