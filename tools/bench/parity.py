#!/usr/bin/env python3
"""Loss and gradient norm of every layout against one process, step by step.

    python -m tools.bench.parity [--steps 20]

Starts torchrun once per number of ranks (1, 2, 4); each start runs its layouts one after the other, for
both shapes, in fp32 and bf16. fp32 differences are absolute, bf16 ones relative to fp32 on one process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_tlt.data.pretrain import DataConfig
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.parallel import ParallelConfig, init_parallel, shutdown_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.train.checkpoint import CheckpointConfig
from megatron_tlt.train.config import LoggingConfig, PretrainConfig, TrainingConfig
from megatron_tlt.train.optimizer import OptimizerConfig
from megatron_tlt.train.pretrain import pretrain
from megatron_tlt.train.profiling import ProfilingConfig
from megatron_tlt.train.setup import build_run
from megatron_tlt.train.watchdog import TimeoutConfig
from tools.bench.common import RESULTS, command_line, write_result

from tqdm import tqdm

TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = DISTRIBUTED | {
    "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000
}  # fmt: skip
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
# name: ranks, parallel, optimizer, model
LAYOUTS = {
    "one process": (1, {}, {}, {}),
    "one process, full recompute": (1, {}, {}, FULL),
    "one process, selective recompute": (1, {}, {}, SELECTIVE),
    "TP2": (2, TP2, {}, {}),
    "TP2+SP": (2, SP2, {}, {}),
    "TP2+SP, full recompute": (2, SP2, {}, FULL),
    "TP2+SP, selective recompute": (2, SP2, {}, SELECTIVE),
    "PP2": (2, PP2, {}, {}),
    "PP2xVPP2": (2, VPP2, {}, {}),
    "PP2xVPP2, full recompute": (2, VPP2, {}, FULL),
    "DP2": (2, {}, {}, {}),
    "DP2, distributed optimizer": (2, {}, DISTRIBUTED, {}),
    "DP2, distributed optimizer, overlapped": (2, {}, OVERLAPPED, {}),
    "TP2xPP2": (4, TP2 | PP2, {}, {}),
    "TP2xPP2xVPP2+SP": (4, SP2 | VPP2, {}, {}),
    "TP2xDP2, distributed optimizer, overlapped": (4, TP2, OVERLAPPED, {}),
}
SHAPES = ("tiny-gpt2", "tiny-llama")


def cells() -> list[tuple[str, str, bool]]:
    return [(name, shape, bf16) for name in LAYOUTS for shape in SHAPES for bf16 in (False, True)]


def worker(folder: Path, steps: int) -> None:
    """On each rank of one torchrun: all cells of this number of ranks."""
    world_size = init_parallel(ParallelConfig(), seed=1).world_size
    for name, shape, bf16 in cells():
        ranks, parallel, optimizer, model = LAYOUTS[name]
        if ranks != world_size:
            continue
        config = PretrainConfig(
            model=ModelConfig(preset=shape, **model),
            parallel=ParallelConfig(**parallel),
            tokenizer=TokenizerConfig(),
            data=DataConfig(mock_data=True, num_workers=0),
            training=TrainingConfig(
                train_iters=steps, global_batch_size=8, micro_batch_size=2, bf16=bf16, eval_iters=0
            ),
            est=EstConfig(),
            precision=PrecisionConfig(),
            optimizer=OptimizerConfig(lr=1e-3, lr_warmup_iters=2, **optimizer),
            checkpoint=CheckpointConfig(),
            timeouts=TimeoutConfig(),
            profiling=ProfilingConfig(),
            logging=LoggingConfig(
                log_interval=1, log_dir=str(folder / cell_name(name, shape, bf16)), peak_tflops=1.0
            ),
        )
        pretrain(build_run(config, init_parallel(config.parallel, seed=config.training.seed)))
    shutdown_parallel()


def cell_name(name: str, shape: str, bf16: bool) -> str:
    return f"{name}, {shape}, {'bf16' if bf16 else 'fp32'}".replace(" ", "_")


def read_steps(folder: Path) -> list[tuple[float, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(record["lm loss"], record["grad-norm"]) for record in map(json.loads, lines)]


def compare(folder: Path) -> list[dict[str, object]]:
    rows = []
    for name, shape, bf16 in cells():
        expected = read_steps(folder / cell_name("one process", shape, False))
        got = read_steps(folder / cell_name(name, shape, bf16))
        pairs = list(zip(got, expected, strict=True))
        row = {"layout": name, "ranks": LAYOUTS[name][0], "shape": shape}
        row |= {"dtype": "bf16" if bf16 else "fp32", "steps": len(pairs)}
        for index, what in enumerate(("loss", "grad_norm")):
            absolute = max(abs(a[index] - b[index]) for a, b in pairs)
            relative = max(abs(a[index] - b[index]) / abs(b[index]) for a, b in pairs)
            row |= {f"{what}_diff": absolute, f"{what}_relative_diff": relative}
        rows.append(row)
    return rows


def summarize(rows: list[dict]) -> dict[str, object]:
    fp32 = [row for row in rows if row["dtype"] == "fp32"]
    bf16 = [row for row in rows if row["dtype"] == "bf16"]
    return {
        "max_loss_diff": max(row["loss_diff"] for row in fp32),
        "max_grad_norm_diff": max(row["grad_norm_diff"] for row in fp32),
        "max_bf16_loss_relative_diff": max(row["loss_relative_diff"] for row in bf16),
        "max_bf16_grad_norm_relative_diff": max(row["grad_norm_relative_diff"] for row in bf16),
        "layouts": sorted({row["layout"] for row in rows}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--toy", action="store_true", help="three steps on one and two ranks")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of parity.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = 3 if options.toy else options.steps
    if options.worker is not None:
        return worker(options.worker, steps)
    if options.toy:
        for name in [n for n, layout in LAYOUTS.items() if layout[0] == 4 or layout[3]]:
            del LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in tqdm(sorted({layout[0] for layout in LAYOUTS.values()}), unit="start"):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc_per_node", str(ranks), "-m", "tools.bench.parity"]
            command += ["--worker", folder, "--steps", str(steps)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1200)
        rows = compare(Path(folder))
    path = write_result(
        "parity", command_line("tools.bench.parity"), rows, summarize(rows), folder=options.output
    )
    print(json.dumps(summarize(rows), indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
