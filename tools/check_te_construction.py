#!/usr/bin/env python3
"""Construct the layers on Transformer Engine's modules without a GPU, and record what they are made of.

    python tools/check_te_construction.py --output tools/te_construction.json

Needs a CUDA build of torch and transformer-engine[pytorch] of the release in requirements-gpu.txt; no GPU,
since nothing is computed: of torch only `cuda.is_available` is told otherwise while modules are constructed.
Checked against our own layers: the parameters, their shapes and their names in a checkpoint are the same. Of
the subnet's layers: TE is handed the slices, and its attention the kept number of heads.
"""

import argparse
import inspect
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

from megatron_tlt.files import write_json
from megatron_tlt.models import te
from megatron_tlt.models.backend import local_layer_spec
from megatron_tlt.models.gpt import GPT, ModelConfig, build_chunks
from megatron_tlt.models.initialize import global_parameters
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.parallel import Parallel, ParallelConfig, init_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.controller import EstSubnets
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from megatron_tlt.subnet.te_modules import est_te_layer_spec

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

SHAPES = {
    "gpt2": dict(preset="tiny-gpt2", num_layers=2),
    "llama": dict(preset="tiny-llama", num_layers=2),
    "qwen": dict(preset="tiny-llama", num_layers=2, add_qkv_bias=True, qk_layernorm=True),
}
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
VOCAB = 128


def describe(chunk: GPT, parallel: Parallel) -> dict[str, dict[str, list[int]]]:
    """Parameters under the names that both back-ends share, and tensors of a checkpoint, with shapes."""
    shards = chunk.sharded_state_dict(metadata={"dp_cp_group": parallel.groups.dp_cp})
    return {
        "parameters": {name: list(p.shape) for name, p in sorted(global_parameters(chunk))},
        "checkpoint": {
            shard.key: list(shard.data.shape)
            for _, shard in sorted(shards.items())
            if not isinstance(shard, ShardedObject)
        },
    }


def build(shape: str, parallel: Parallel, spec, **precision: object) -> tuple[ModelConfig, GPT]:
    model, options = ModelConfig(**SHAPES[shape]), {"transformer_impl": "local"} | precision
    (chunk,) = build_chunks(
        model, parallel, vocab_size=VOCAB, params_dtype=torch.bfloat16, layer_spec=spec,
        precision=PrecisionConfig(**options),
    )  # fmt: skip
    return model, chunk


def check_slices(model: ModelConfig, chunk: GPT, parallel: Parallel) -> dict[str, list[int]]:
    """What TE is handed in a step at half of heads and neurons. Raises AssertionError when it is not half."""
    options = {"schedule": "practical", "order": ["heads+mlp"], "layers": 1, "ends": [1]}
    schedule = build_schedule(
        EstConfig(**options), ModelShape.of(model, padded_vocab_size=VOCAB), train_iters=10, seed=1,
        tokens_after=lambda n: n,
    )  # fmt: skip
    subnets = EstSubnets(schedule, parallel)
    subnets.attach([chunk])
    subnets.begin_step(0)
    layer, sizes = chunk.decoder.layers[0], {}
    for piece in layer.linears:
        weight, _ = getattr(piece, te.WEIGHT_SOURCE)()
        sizes[f"{type(piece).__name__} {list(piece.weight.shape)}"] = list(weight.shape)
        assert weight.numel() < piece.weight.numel(), f"{type(piece).__name__} is not sliced"
    attention = layer.self_attention
    groups = attention.core_attention.num_gqa_groups_per_partition
    assert groups == attention.num_query_groups_per_partition
    with subnets.full_model():
        for piece in layer.linears:
            assert getattr(piece, te.WEIGHT_SOURCE)()[0] is piece.weight
        assert attention.core_attention.num_gqa_groups_per_partition == model.num_query_groups
    return sizes | {"key/value heads of the attention": [groups]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the record")
    output = parser.parse_args().output
    te.check_installed()
    te.check_weight_source(te.TELayerNormColumnParallelLinear, te.TERowParallelLinear)
    parallel, record = init_parallel(ParallelConfig(), seed=1), {}
    for shape in SHAPES:
        ours = describe(build(shape, parallel, local_layer_spec)[1], parallel)
        with mock.patch("torch.cuda.is_available", lambda: True):
            dense = describe(build(shape, parallel, te.te_layer_spec)[1], parallel)
            model, chunk = build(shape, parallel, est_te_layer_spec)
            subnet = describe(chunk, parallel)
            slices = check_slices(model, chunk, parallel)
            for recipe in RECIPES:
                build(shape, parallel, est_te_layer_spec, transformer_impl="transformer_engine",
                      fp8="hybrid", fp8_recipe=recipe)  # fmt: skip
        assert dense == ours, f"{shape}: Transformer Engine's layer is {dense}, ours {ours}"
        assert subnet == ours, f"{shape}: the subnet's layer is {subnet}, ours {ours}"
        record[shape] = dense | {"slices at 1/2": slices}
        print(f"{shape}: {len(dense['parameters'])} parameters and {len(slices)} slices as expected")
    wrappers = (te.TELayerNormColumnParallelLinear, te.TERowParallelLinear, te.TEDotProductAttention)
    signatures = {
        f"{c.__module__}.{c.__name__}.forward": str(inspect.signature(c.forward))
        for wrapper in wrappers
        for c in wrapper.__mro__
        if c.__module__.startswith(("transformer_engine.", "megatron.core.extensions"))
        and "forward" in vars(c)
    }
    versions = {name: metadata.version(name) for name in ("transformer-engine", "megatron-core", "torch")}
    write_json(output, {"versions": versions, "signatures": signatures, "shapes": record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
