"""Full-model validation loss against FLOPs and time: subnet training, its baselines and dense, side by side.

A campaign is every combination of shape, regime, variant, learning rate and seed. A finished run is appended
to results/NAME_runs.jsonl at once; started again, the campaign goes on with what is missing there. All runs
of a seed see the same tokens in the same order. Two regimes: `single_epoch` never repeats a token, `limited`
repeats a small set over and over, as the EST paper's GPT-2 setting does; each is a study of its own:

    python -m tools.bench.est curve --seeds 1 2 3 --lrs 1e-3 2e-3 4e-3
    python -m tools.bench.est curve --summary                       # results/est_curve.json and .png
    python -m tools.bench.est curve --name est_limited --regimes limited
    python -m tools.bench.est curve --name est_trend --hidden 128 256 384 --steps 250 500 1000
    python -m tools.bench.est_curve --toy                           # seconds; for CI
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt.data.indexed import IndexedDataset
from megatron_tlt.data.pretrain import DataConfig
from megatron_tlt.data.sampler import collate
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.parallel import Parallel, ParallelConfig, init_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.stats import StepOutcome
from megatron_tlt.train.checkpoint import CheckpointConfig
from megatron_tlt.train.config import LoggingConfig, PretrainConfig, TrainingConfig
from megatron_tlt.train.estimate import count_parameters
from megatron_tlt.train.optimizer import OptimizerConfig
from megatron_tlt.train.pretrain import evaluate_run
from megatron_tlt.train.profiling import ProfilingConfig
from megatron_tlt.train.setup import PretrainRun, build_run
from megatron_tlt.train.step import train_step
from megatron_tlt.train.watchdog import TimeoutConfig
from tools.bench.common import RESULTS, command_line, write_result
from tools.bench.est_data import books_tokenizer, prepare_books, train_prefix, valid_prefix
from tools.bench.est_summary import plot, summarise
from tools.bench.est_variants import VARIANTS, model_options

import torch

REGIMES = ("single_epoch", "limited")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run; its fields are its identity in the runs file."""

    shape: str
    regime: str
    variant: str
    est: dict
    lr: float
    seed: int
    steps: int
    hidden: int
    layers: int
    seq: int
    global_batch: int
    dtype: str
    limited_tokens: int


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Seed by seed, so that a campaign that is cut short has whole comparisons."""
    variants = VARIANTS | options.est
    unknown = [name for name in options.variants if name not in variants]
    if unknown:
        raise SystemExit(f"unknown variants {unknown}: known are {list(variants)}, or define with --est")
    for seed, steps, hidden, regime, shape, variant, lr in itertools.product(
        options.seeds, options.steps, options.hidden, options.regimes, options.shapes, options.variants,
        options.lrs,
    ):
        yield Cell(
            shape=shape, regime=regime, variant=variant, est=variants[variant], lr=lr, seed=seed,
            steps=steps, hidden=hidden, layers=options.layers, seq=options.seq,
            global_batch=options.global_batch, dtype=options.dtype,
            limited_tokens=options.limited_tokens if regime == "limited" else 0,
        )  # fmt: skip


def config_of(cell: Cell, options: argparse.Namespace) -> PretrainConfig:
    data, tokenizer = DataConfig(mock_data=True, num_workers=0), TokenizerConfig()
    if not options.toy:
        tokenizer = books_tokenizer(options.work)
        data = DataConfig(
            train_data_path=[train_prefix(options.work, cell.limited_tokens or None)],
            valid_data_path=[valid_prefix(options.work)],
            num_workers=0,
            data_order="extendable",  # epoch by epoch
        )
    shape = model_options(cell.shape, hidden=cell.hidden, layers=cell.layers, seq=cell.seq)
    return PretrainConfig(
        model=ModelConfig(**shape),
        parallel=ParallelConfig(),
        tokenizer=tokenizer,
        data=data,
        training=TrainingConfig(
            train_iters=cell.steps, global_batch_size=cell.global_batch,
            micro_batch_size=options.micro_batch, seed=cell.seed, bf16=cell.dtype == "bf16",
            eval_iters=options.eval_iters,
        ),
        est=EstConfig(**cell.est),
        precision=PrecisionConfig(),
        optimizer=OptimizerConfig(lr=cell.lr, lr_warmup_iters=min(100, cell.steps // 10)),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
        timeouts=TimeoutConfig(),
        profiling=ProfilingConfig(),
    )  # fmt: skip


class Clock:
    """CPU and wall seconds of the training steps alone, and their FLOPs."""

    def __init__(self) -> None:
        self.cpu = self.wall = self.flops = 0.0

    def start(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def stop(self, flops: float) -> float:
        """Wall seconds since `start`."""
        wall = time.perf_counter() - self._began[1]
        self.cpu += time.process_time() - self._began[0]
        self.wall += wall
        self.flops += flops
        return wall


def train(cell: Cell, parallel: Parallel, options: argparse.Namespace) -> dict:
    """One run: its record for the runs file."""
    config = config_of(cell, options)
    run, clock, curve, losses = build_run(config, parallel), Clock(), [], []
    for step in range(cell.steps):
        losses.append(_step(run, step, clock))
        if (step + 1) % options.eval_interval == 0 or step + 1 == cell.steps:
            loss, _ = evaluate_run(run)
            curve.append(
                {"step": step + 1, "loss": loss, "train_loss": sum(losses) / len(losses),
                 "flops": clock.flops, "cpu_s": clock.cpu, "wall_s": clock.wall}
            )  # fmt: skip
            losses.clear()
            _tell(cell, curve[-1])
    padded = config.model.padded_vocab_size(run.tokenizer.vocab_size, 1)
    parameters = count_parameters(config.model, padded_vocab_size=padded).total
    return {"cell": asdict(cell), "parameters": parameters, "curve": curve}


def _step(run: PretrainRun, step: int, clock: Clock) -> float:
    """Train on the next samples; returns the loss of the subnet."""
    training = run.config.training
    size, micro = training.global_batch_size, training.micro_batch_size
    samples = [run.train_data[step * size + i] for i in range(size)]
    batches = [collate(samples[i : i + micro]) for i in range(0, size, micro)]
    clock.start()
    run.subnets.begin_step(step)
    result = train_step(run.chunks, run.optimizer, batches, parallel=run.parallel)
    if not result.updated:
        raise SystemExit(f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}")
    run.scheduler.step(increment=size)
    tokens = size * run.config.model.seq_length
    seconds = clock.stop(run.subnets.flops_per_token * tokens)
    run.subnets.end_step(
        StepOutcome(
            loss=result.loss, grad_norm=result.grad_norm, tokens=tokens, seconds=seconds,
            clip_grad=run.config.optimizer.clip_grad,
        )
    )  # fmt: skip
    return result.loss


def _refuse_repeats(cell: Cell, options: argparse.Namespace) -> None:
    """A single epoch must not need a token twice."""
    if options.toy or cell.regime == "limited":
        return
    wanted = cell.steps * cell.global_batch * cell.seq
    have = len(IndexedDataset(train_prefix(options.work, None)).tokens)
    if wanted >= have:
        raise SystemExit(f"{cell.steps} steps take {wanted} tokens, an epoch of the books has {have}")


def _tell(cell: Cell, point: dict) -> None:
    print(
        f"{cell.regime} {cell.shape} {cell.variant} lr {cell.lr:g} seed {cell.seed} | step "
        f"{point['step']}/{cell.steps} | validation {point['loss']:.4f} training "
        f"{point['train_loss']:.4f} | {point['flops']:.3e} FLOPs {point['cpu_s']:.0f} CPU s",
        flush=True,
    )


def runs_file(options: argparse.Namespace) -> Path:
    """Beside the result, so that what a study found can be checked and gone on with."""
    return options.output / f"{options.name}_runs.jsonl"


def read_runs(path: Path) -> list[dict]:
    """The finished runs; a last line that was cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def campaign(options: argparse.Namespace) -> list[dict]:
    """Run what the runs file lacks; returns all that it then holds."""
    path, parallel = runs_file(options), init_parallel(ParallelConfig(), seed=1)
    if not options.toy:
        prepare_books(options.work)
    done = [run["cell"] for run in read_runs(path)]
    wanted = [cell for cell in cells(options) if asdict(cell) not in done]
    print(f"{len(wanted)} runs to do, {len(done)} in {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    for cell in wanted:
        _refuse_repeats(cell, options)
        record = train(cell, parallel, options)
        with open(path, "r+" if path.exists() else "w", encoding="utf-8") as file:
            file.seek(_end_of_lines(path))
            file.truncate()
            file.write(json.dumps(record) + "\n")
    return read_runs(path)


def _end_of_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1


def _named_json(text: str) -> tuple[str, dict]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.bench.est curve", description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("runs/est_curve"), help="folder of the data")
    parser.add_argument("--summary", action="store_true", help="run nothing, write the result")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result and its runs")
    parser.add_argument("--name", default="est_curve", help="the result's, one for each study")
    parser.add_argument("--toy", action="store_true", help="tiny, on synthetic tokens; for CI")
    parser.add_argument("--shapes", nargs="+", default=["gpt2", "llama"], choices=["gpt2", "llama"])
    parser.add_argument("--regimes", nargs="+", default=["single_epoch"], choices=REGIMES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS)[:11], metavar="NAME")
    parser.add_argument("--est", nargs="+", type=_named_json, default=[], metavar="NAME=JSON",
                        help="more variants, as fields of the est section")  # fmt: skip
    parser.add_argument("--lrs", nargs="+", type=float, default=[2e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, nargs="+", default=[1500])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=16, help="samples per step")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--limited-tokens", type=int, default=500_000)
    parser.add_argument("--eval-interval", type=int, default=100)
    parser.add_argument("--eval-iters", type=int, default=8, help="global batches per evaluation")
    options = parser.parse_args(argv)
    options.est = dict(options.est)
    if options.toy:
        options.shapes, options.regimes, options.seeds = ["llama"], ["single_epoch"], [1]
        options.variants = ["dense", "nested", "random_every_step", "layer_drop"]
        options.steps, options.hidden, options.layers, options.seq = [12], [64], 4, 32
        options.global_batch = options.micro_batch = options.eval_interval = 4
        options.eval_iters = 1
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    runs = read_runs(runs_file(options)) if options.summary else campaign(options)
    if not (options.summary or options.toy):
        return
    rows, summary = summarise(runs)
    write_result(options.name, command_line("tools.bench.est"), rows, summary, folder=options.output)
    plot(runs, options.output / f"{options.name}.png")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
