"""How much of the FLOPs that a subnet leaves out is time that a step leaves out.

`speed`: whole training steps (data parallel wrapper, optimizer and clipping included) of subnets against
the dense model, alternating in one process. `realised` is the share of time saved over the share of FLOPs
saved, output head included in both; 1.0 is ideal. What does not shrink counts against it: the optimizer,
embedding and loss for all subnets, norms and residuals for widths.

    python -m tools.bench.est speed          # writes results/est_speed.json
    python -m tools.bench.est speed --toy    # seconds; for CI

`curve`: does a run on subnets reach the dense loss for less? See est_curve.py.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from megatron_tlt.models.backend import local_layer_spec
from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.parallel import Parallel, ParallelConfig, init_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.controller import EstSubnets
from megatron_tlt.subnet.flops import dense_flops, plan_flops
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from megatron_tlt.subnet.spec import est_layer_spec
from megatron_tlt.train.optimizer import OptimizerConfig, build_optimizer, wrap_data_parallel
from megatron_tlt.train.step import attach_finalizer, train_step
from tools.bench import est_curve
from tools.bench.common import RESULTS, command_line, write_result

import torch

VOCAB = 2048
WIDTHS = {"layers": 1, "heads": "1/2", "mlp": "1/2"}
CELLS = {
    "layers": {"layers": "1/2", "heads": 1, "mlp": 1},
    "widths": WIDTHS,
    "widths, nested": WIDTHS | {"draw": "nested", "tp_strata": 1},
    "all": {"layers": "1/2", "heads": "1/2", "mlp": "1/2"},
    "all, nested": {"draw": "nested", "tp_strata": 1},
}


class Trainer:
    """Full training steps of one model on one process; `options` of its subnets, None: dense."""

    def __init__(self, model: ModelConfig, options: dict | None, parallel: Parallel) -> None:
        self.parallel, self.subnets, self.step_number = parallel, None, 0
        spec = local_layer_spec if options is None else est_layer_spec
        bare = build_chunks(model, parallel, vocab_size=VOCAB, layer_spec=spec)
        initialize_parameters(bare, seed=1, vocab_size=VOCAB)
        config = OptimizerConfig(lr=3e-4)
        self.chunks = wrap_data_parallel(bare, config, parallel)
        attach_finalizer(self.chunks, parallel)
        self.optimizer = build_optimizer(self.chunks, config, parallel)
        if options is None:
            return
        est = {"schedule": "practical", "order": ["layers+heads+mlp"], "ends": [1]} | options
        schedule = build_schedule(
            EstConfig(**est), ModelShape.of(model, padded_vocab_size=VOCAB), train_iters=1000,
            seed=1, tokens_after=lambda n: n,
        )  # fmt: skip
        self.subnets = EstSubnets(schedule, parallel)
        self.subnets.attach(self.chunks, self.optimizer)

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """Seconds of CPU time that the step took, the plan and the gathering included."""
        before = time.process_time()
        if self.subnets is not None:
            self.subnets.begin_step(self.step_number)
        train_step(self.chunks, self.optimizer, batches, parallel=self.parallel)
        self.step_number += 1
        return time.process_time() - before


def batches_of(model: ModelConfig, options: argparse.Namespace, step: int) -> list[dict]:
    """Random tokens, the same for both sides."""
    shape = (options.micro_batch, model.seq_length + 1)
    out = []
    for number in range(options.microbatches):
        generator = torch.Generator().manual_seed(100 * step + number)
        data = torch.randint(0, VOCAB, shape, generator=generator)
        tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        out.append(
            {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(tokens.shape),
             "position_ids": torch.arange(model.seq_length).expand_as(tokens)}
        )  # fmt: skip
    return out


def measure(shape: str, cell: str, parallel: Parallel, options: argparse.Namespace) -> dict:
    """One row: a subnet's step against the dense step, alternating."""
    model = ModelConfig(
        preset=f"tiny-{shape}", num_layers=options.layers, hidden_size=options.hidden,
        num_attention_heads=options.hidden // 64, num_query_groups=options.hidden // 64
        if shape == "gpt2" else options.hidden // 128, seq_length=options.seq,
        ffn_hidden_size=options.hidden * 4 if shape == "gpt2" else options.hidden * 11 // 4,
    )  # fmt: skip
    sides = {"dense": Trainer(model, None, parallel), "subnet": Trainer(model, CELLS[cell], parallel)}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(options.steps + 1):
        for name in sorted(sides, reverse=step % 2 == 1):
            batches, before = batches_of(model, options, step), time.perf_counter()
            cpu[name].append(sides[name].step(batches))
            wall[name].append(time.perf_counter() - before)
    subnets = sides["subnet"].subnets
    saved = 1 - (
        plan_flops(subnets.schedule, subnets.plan).total / dense_flops(subnets.schedule.shape).total
    )
    row = {
        "shape": shape, "cell": cell, "hidden": options.hidden, "layers": options.layers,
        "tokens_per_step": options.microbatches * options.micro_batch * options.seq,
        "microbatches": options.microbatches, "steps": options.steps,
        "flops_saved": round(saved, 4),
    }  # fmt: skip
    for kind, times in (("cpu", cpu), ("wall", wall)):
        dense, subnet = (statistics.median(times[name][1:]) for name in ("dense", "subnet"))
        ratios = [b / a for a, b in zip(times["dense"][1:], times["subnet"][1:])]
        row |= {
            f"dense_{kind}_s": round(dense, 4), f"subnet_{kind}_s": round(subnet, 4),
            f"{kind}_saved": round(1 - statistics.median(ratios), 4),
            f"realised_{kind}": round((1 - statistics.median(ratios)) / saved, 4),
        }  # fmt: skip
    return row


def main() -> None:
    if sys.argv[1:2] == ["curve"]:
        est_curve.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="speed", choices=["speed", "curve"])
    parser.add_argument("--toy", action="store_true", help="seconds instead of minutes; for CI")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--shapes", nargs="+", default=["gpt2", "llama"], choices=["gpt2", "llama"])
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    if options.toy:
        options.hidden, options.seq, options.micro_batch, options.steps = 128, 32, 2, 2
    torch.set_num_threads(1)
    parallel = init_parallel(ParallelConfig(), seed=1)
    rows = []
    for shape in options.shapes:
        for cell in options.cells:
            rows.append(measure(shape, cell, parallel, options))
            print(rows[-1], flush=True)
    summary = {
        f"realised_{name}": round(
            statistics.mean(r["realised_cpu"] for r in rows if r["cell"].split(",")[0] == name), 4
        )
        for name in sorted({row["cell"].split(",")[0] for row in rows})
    } | {"time": "CPU seconds of one thread, which other processes on the machine move least"}
    write_result("est_speed", command_line("tools.bench.est"), rows, summary, folder=options.output)


if __name__ == "__main__":
    main()
