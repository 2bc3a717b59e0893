"""Each FP8 recipe against bf16: the error of its products beside theory, and the loss of whole training runs.

The runs have the same weights, data and schedule and differ by the precision of the linear layers only. The
model is the quickstart's shape with an MLP of 768 neurons (blockwise needs multiples of 128) on bytes of the
Python standard library. Theory: the errors of rounding two normal factors, independent
(ops/fp8.rounding_error).

Two bf16 runs whose initial weights differ by one rounding of bf16 end up to more than 1 % apart, so a single
pair of runs says little about a recipe. Every precision therefore starts from `--starts` such neighbouring
weights. `loss_diff_pct` compares the means over them of the training loss of the last tenth of the steps;
`loss_diff_error` is the standard error of the mean of the differences, start by start.

    python -m tools.bench.fp8               # 45 minutes of one core; writes results/fp8.json and fp8.png
    python -m tools.bench.fp8 --toy         # seconds; for CI
    python -m tools.bench.fp8 --controls 3  # how far bf16 runs lie apart: results/fp8_noise.json
"""

import argparse
import math
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.data.corpus import read_documents
from megatron_tlt.data.prepare import prepare_corpus
from megatron_tlt.models.fp8_linear import Fp8Quantizer
from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.ops.fp8 import FP8_MAX, rounding_error
from megatron_tlt.ops.fp8_linear import fp8_linear
from megatron_tlt.ops.fp8_recipe import GRAD, INPUT, WEIGHT, Recipe
from megatron_tlt.ops.linear import linear
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.train.optimizer import (
    OptimizerConfig, build_optimizer, build_scheduler, wrap_data_parallel,
)  # fmt: skip
from megatron_tlt.train.step import attach_finalizer, train_step
from tools.bench.common import RESULTS, command_line, write_result

import matplotlib
import torch
from tqdm import tqdm

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

BYTES = 256
Outcome = tuple[list[float], float]
"""Loss of every step, and the seconds of CPU time."""
PRECISIONS: dict[str, dict[str, object]] = {
    "bf16": {},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}  # fmt: skip


def product_errors(recipe: Recipe | None, *, tokens: int, features: int) -> dict[str, float]:
    """Relative errors (Frobenius norm) of the products of one layer on normal operands, against float64,
    and the theory of the FP8 ones. Delayed scaling: with the scales that the operands themselves set."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, features), (features, features), (tokens, features))
    x, w, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    if recipe is None:
        out = linear(*leaves)
    else:
        quantizer = Fp8Quantizer(recipe)
        if recipe.is_delayed:
            amax = torch.stack([t.abs().max().float() for t in (x, w, grad)])
            quantizer.scale.copy_(recipe.largest() / amax)
        out = fp8_linear(*leaves, quantizer=quantizer)
    out.backward(grad)
    x, w, grad = x.double(), w.double(), grad.double()
    pairs = {
        "gemm": (out, x @ w.t()), "dgrad": (leaves[0].grad, grad @ w),
        "wgrad": (leaves[1].grad, grad.t() @ x),
    }  # fmt: skip
    errors = {
        f"{name}_rel_err": round(((ours - exact).norm() / exact.norm()).item(), 5)
        for name, (ours, exact) in pairs.items()
    }
    return errors if recipe is None else errors | _theory(recipe, (x, w, grad))


def _theory(recipe: Recipe, operands: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """The errors of two independently rounded factors add in squares. Tiles are scaled by powers of two,
    which changes no relative error; one scale a tensor moves its values within a binade."""
    errors = []
    for tensor, x in enumerate(operands):
        sigma, dtype = x.std().item(), recipe.dtype(tensor)
        if recipe.alignment == 16:
            sigma *= FP8_MAX[dtype] / x.abs().max().item()
        errors.append(rounding_error(dtype, sigma))
    pairs = {"gemm": (INPUT, WEIGHT), "dgrad": (GRAD, WEIGHT), "wgrad": (GRAD, INPUT)}
    return {
        f"{name}_theory": round(math.hypot(errors[i], errors[j]), 5) for name, (i, j) in pairs.items()
    }


def corpus_bytes(size: int) -> torch.Tensor:
    """The first `size` bytes of the training part of the Python standard library's source."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_corpus("python_stdlib", folder, data_dir=None)
        text, total = [], 0
        for document in read_documents(Path(folder) / "train.jsonl"):
            text.append(document.encode("utf-8"))
            total += len(text[-1])
            if total >= size:
                break
    return torch.frombuffer(bytearray(b"".join(text)[:size]), dtype=torch.uint8).long()


def batch_of(corpus: torch.Tensor, step: int, options: argparse.Namespace) -> dict:
    """The batch of a step: the same for every precision."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - options.seq - 1, (options.batch,), generator=generator)
    data = torch.stack([corpus[start : start + options.seq + 1] for start in starts.tolist()])
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    positions = torch.arange(options.seq).expand_as(tokens)
    return {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(tokens.shape),
            "position_ids": positions}  # fmt: skip


def train(
    precision: PrecisionConfig, corpus: torch.Tensor, options: argparse.Namespace, control: int = 0
) -> Outcome:
    """One run. A `control` above 0 is the seed of noise of one rounding on the initial weights."""
    torch.set_num_threads(1)
    parallel, before = init_parallel(ParallelConfig(), seed=1), time.process_time()
    model = ModelConfig(
        num_layers=options.layers, hidden_size=options.hidden, ffn_hidden_size=3 * options.hidden,
        num_attention_heads=4, num_query_groups=2, seq_length=options.seq,
    )  # fmt: skip
    precision.check_shapes(model, tensor_model_parallel_size=1, micro_batch_size=options.batch)
    bare = build_chunks(
        model, parallel, vocab_size=BYTES, params_dtype=torch.bfloat16, precision=precision
    )
    initialize_parameters(bare, seed=1, vocab_size=BYTES)
    if control:
        torch.manual_seed(control)
        with torch.no_grad():
            for p in bare[0].parameters():
                p.mul_(1.0 + 2.0**-8 * torch.randn(p.shape))
    config = OptimizerConfig(
        lr=7e-4, min_lr=7e-5, lr_decay_style="cosine", lr_warmup_iters=options.steps // 20
    )
    chunks = wrap_data_parallel(bare, config, parallel)
    attach_finalizer(chunks, parallel)
    optimizer = build_optimizer(chunks, config, parallel)
    scheduler = build_scheduler(
        optimizer, config, train_iters=options.steps, samples_after=lambda n: n * options.batch
    )
    losses = []
    for step in range(options.steps):
        batch = {k: v.to(device.device()) for k, v in batch_of(corpus, step, options).items()}
        losses.append(train_step(chunks, optimizer, [batch], parallel=parallel).loss)
        scheduler.step(increment=options.batch)
    return losses, time.process_time() - before


def measure_noise(corpus: torch.Tensor, options: argparse.Namespace) -> None:
    """bf16 runs that differ by a rounding of the initial weights, each against the first."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        runs = [
            pool.submit(train, PrecisionConfig(), corpus, options, control)
            for control in range(options.controls + 1)
        ]
        losses = _last_losses([run.result() for run in runs])
    rows = [
        {"control": number, "steps": options.steps, "last_loss": round(loss, 5),
         "loss_diff_pct": round(100 * abs(loss / losses[0] - 1), 4)}
        for number, loss in enumerate(losses)
    ]  # fmt: skip
    summary = {"max_loss_diff_pct": max(row["loss_diff_pct"] for row in rows)}
    write_result("fp8_noise", command_line("tools.bench.fp8"), rows, summary, folder=options.output)


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Loss of every recipe, and its difference from bf16 in percent, both as means of a window."""
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 6), layout="constrained")
    window = max(1, len(curves["bf16"]) // 50)
    base = _means(curves["bf16"], window)
    steps = [window * (number + 1) for number in range(len(base))]
    for name, curve in curves.items():
        means = _means(curve, window)
        above.plot(steps, means, label=name)
        below.plot(steps, [100 * (a / b - 1) for a, b in zip(means, base)], label=name)
    above.set(ylabel="loss (nats per byte)", yscale="log")
    below.set(xlabel="step", ylabel="difference from bf16 (%)", ylim=(-3, 3))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend()
    figure.savefig(path, dpi=120)


def _means(values: list[float], window: int) -> list[float]:
    iterator = iter(values)
    chunks = iter(lambda: list(islice(iterator, window)), [])
    return [sum(chunk) / len(chunk) for chunk in chunks]


def train_all(
    precisions: dict[str, PrecisionConfig], corpus: torch.Tensor, options: argparse.Namespace
) -> dict[str, list[Outcome]]:
    """What `train` returns for every precision and start, as they finish on a progress bar."""
    context, numbers = multiprocessing.get_context("spawn"), range(options.starts)
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        runs = {
            (name, number): pool.submit(train, precision, corpus, options, number)
            for number in numbers
            for name, precision in precisions.items()
        }
        for _ in tqdm(as_completed(runs.values()), total=len(runs), desc="runs"):
            pass
    return {name: [runs[name, number].result() for number in numbers] for name in precisions}


def row_of(
    name: str, precision: PrecisionConfig, outcomes: dict[str, list[Outcome]], options: argparse.Namespace
) -> dict:
    """One recipe against bf16."""
    losses, base = (_last_losses(outcomes[key]) for key in (name, "bf16"))
    differences = [100 * (ours / theirs - 1) for ours, theirs in zip(losses, base)]
    loss = statistics.mean(losses)
    row = {
        "recipe": name, "fp8": precision.fp8 or "none", "steps": options.steps, "layers": options.layers,
        "hidden": options.hidden, "tokens_per_step": options.batch * options.seq,
        "starts": options.starts, "first_loss": round(outcomes[name][0][0][0], 5),
        "last_loss": round(loss, 5),
        "loss_diff_pct": round(100 * abs(loss / statistics.mean(base) - 1), 4),
        "loss_diff_each": [round(difference, 3) for difference in differences],
        "loss_diff_error": round(statistics.stdev(differences) / math.sqrt(len(differences)), 4),
    }  # fmt: skip
    row |= product_errors(precision.recipe, tokens=1024, features=options.hidden)
    row["cpu_s"] = round(statistics.mean(seconds for _, seconds in outcomes[name]), 1)
    print(row, flush=True)
    return row


def _last_losses(runs: list[Outcome]) -> list[float]:
    """Mean loss of the last tenth of each run's steps."""
    return [statistics.mean(losses[-max(1, len(losses) // 10) :]) for losses, _ in runs]


def _mean_curve(runs: list[Outcome]) -> list[float]:
    return [statistics.mean(step) for step in zip(*(losses for losses, _ in runs))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="seconds instead of minutes; for CI")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--controls", type=int, default=0, help="measure the noise of bf16 runs instead")
    parser.add_argument("--starts", type=int, default=5, help="initial weights of each precision, 2 or more")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.layers, options.hidden, options.seq = 4, 2, 128, 64
        options.starts = 2
    if options.starts < 2:
        parser.error(f"--starts {options.starts}: one pair of runs says nothing, give at least 2")
    corpus = corpus_bytes(200_000 if options.toy else 8_000_000)
    if options.controls:
        measure_noise(corpus, options)
        return
    precisions = {name: PrecisionConfig(**fields) for name, fields in PRECISIONS.items()}
    outcomes = train_all(precisions, corpus, options)
    rows = [row_of(name, precisions[name], outcomes, options) for name in precisions]
    fp8 = [row for row in rows if row["fp8"] != "none"]
    summary = {
        "max_loss_diff_pct": max(row["loss_diff_pct"] for row in fp8),
        "max_gemm_rel_err": max(row["gemm_rel_err"] for row in fp8),
        "time": "cpu_s is emulation on one core and says nothing about FP8 hardware",
    }
    write_result("fp8", command_line("tools.bench.fp8"), rows, summary, folder=options.output)
    curves = {name: _mean_curve(runs) for name, runs in outcomes.items()}
    plot(curves, options.output / "fp8.png")


if __name__ == "__main__":
    main()
