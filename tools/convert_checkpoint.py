#!/usr/bin/env python3
"""Convert between Hugging Face folders, GGUF files and checkpoints; always verified against transformers.

    python tools/convert_checkpoint.py gguf-to-hf     --load model.gguf --save hf/
    python tools/convert_checkpoint.py hf-to-megatron --load hf/        --save checkpoints/
    torchrun --nproc_per_node 4 tools/convert_checkpoint.py megatron-to-hf \\
        --load checkpoints/ --save out/ --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
"""

import argparse
import json
import sys
from dataclasses import asdict

from megatron_tlt.bridge.convert import gguf_to_hf, hf_to_megatron, megatron_to_hf
from megatron_tlt.bridge.load import dtype_of
from megatron_tlt.data.tokenizer import add_tokenizer_arguments, tokenizer_config
from megatron_tlt.parallel import ParallelConfig, init_parallel, shutdown_parallel


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, load_help in (
        ("hf-to-megatron", "Hugging Face folder with config.json and safetensors"),
        ("megatron-to-hf", "checkpoint folder (the newest iter_*), or one iter_* folder"),
        ("gguf-to-hf", "GGUF file with the Llama layout"),
    ):
        command = commands.add_parser(name)
        command.add_argument("--load", required=True, help=load_help)
        command.add_argument("--save", required=True, help="folder to create")
        if name == "gguf-to-hf":
            continue
        command.add_argument("--tensor-model-parallel-size", type=int, default=1)
        command.add_argument("--pipeline-model-parallel-size", type=int, default=1)
        command.add_argument(
            "--dtype", help="float32, bfloat16 or float16; default: as the weights are stored"
        )
        if name == "megatron-to-hf":
            command.add_argument("--max-shard-bytes", type=int, default=2 * 1000**3)
            add_tokenizer_arguments(command, required=False)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    parallel = init_parallel(
        ParallelConfig(
            tensor_model_parallel_size=getattr(args, "tensor_model_parallel_size", 1),
            pipeline_model_parallel_size=getattr(args, "pipeline_model_parallel_size", 1),
        ),
        seed=0,
    )
    if args.command == "gguf-to-hf":
        conversion = gguf_to_hf(args.load, args.save, parallel)
    else:
        dtype = dtype_of(args.dtype) if args.dtype else None
        if args.command == "hf-to-megatron":
            conversion = hf_to_megatron(args.load, args.save, parallel, dtype=dtype)
        else:
            tokenizer = tokenizer_config(vars(args)) if args.tokenizer_type else None
            conversion = megatron_to_hf(
                args.load,
                args.save,
                parallel,
                dtype=dtype,
                tokenizer=tokenizer,
                max_shard_bytes=args.max_shard_bytes,
            )
    if parallel.rank == 0:
        print(json.dumps(asdict(conversion), indent=1))
    shutdown_parallel()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
