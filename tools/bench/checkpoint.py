"""How long a save keeps training waiting: synchronous, asynchronous, and asynchronous of selected tensors.

    python -m tools.bench.checkpoint [--toy] [--repeats 5] [--output DIR]

One process, a 50M-parameter Llama-shaped model with fp32 weights and Adam state. Between the saves it takes
training steps, so the tensors change and the asynchronous writer has something to compete with. The stall is
the time inside `save` plus that of all `poll` calls until the checkpoint is published; `step_ms` is a
training step without a save, `step_while_writing_ms` one while the writer works. The selection leaves out
the embedding and the output layer, as a drafter does that borrows them from its target. The three alternate
in each repeat.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.train.checkpoint import TrainState
from megatron_tlt.train.optimizer import OptimizerConfig, build_optimizer, wrap_data_parallel
from megatron_tlt.train.save import CheckpointSaver
from megatron_tlt.train.step import attach_finalizer, train_step
from tools.bench.common import RESULTS, command_line, write_result

import torch

_PAPER_MS = {"sync": 893, "async": 280, "selective": 97}
_VOCAB = 16384


def without_tables(name: str) -> bool:
    """The selection: all tensors but the embedding's and the output layer's."""
    return "word_embeddings" not in name and "output_layer" not in name


class Trainee:
    """A model that can take steps on random tokens."""

    def __init__(self, model: ModelConfig) -> None:
        self.parallel = init_parallel(ParallelConfig(), seed=1)
        self.model = build_chunks(model, self.parallel, vocab_size=_VOCAB, params_dtype=torch.float32)
        initialize_parameters(self.model, seed=1, vocab_size=_VOCAB)
        config = OptimizerConfig(lr=1e-4)
        self.chunks = wrap_data_parallel(self.model, config, self.parallel)
        attach_finalizer(self.chunks, self.parallel)
        self.optimizer = build_optimizer(self.chunks, config, self.parallel)
        self._length = model.seq_length

    @property
    def parameters(self) -> int:
        return sum(p.numel() for chunk in self.model for p in chunk.parameters())

    def step(self) -> float:
        """Train on one random sequence; seconds."""
        tokens = torch.randint(0, _VOCAB, (1, self._length + 1), device=device.device())
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(1, self._length, device=device.device()),
            "position_ids": torch.arange(self._length, device=device.device())[None],
        }
        began = time.perf_counter()
        train_step(self.chunks, self.optimizer, [batch], parallel=self.parallel)
        device.synchronize()
        return time.perf_counter() - began


def measure(trainee: Trainee, saver: CheckpointSaver, iteration: int, *, keep=None) -> dict[str, float]:
    """Save once, train until it is published; seconds of stall and more."""
    began = time.perf_counter()
    folder = saver.save(TrainState(iteration=iteration), trainee.model, trainee.optimizer, keep=keep)
    stalls, steps = [time.perf_counter() - began], []
    while not folder.exists():
        steps.append(trainee.step())
        asked = time.perf_counter()
        saver.poll()
        stalls.append(time.perf_counter() - asked)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "stall_ms": sum(stalls) * 1e3,
        "copy_ms": stalls[0] * 1e3,
        "durable_after_ms": (time.perf_counter() - began) * 1e3,
        "mib": size / 2**20,
        "step_while_writing_ms": statistics.median(steps) * 1e3 if steps else 0.0,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="a tiny model and one repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    sizes = {"num_layers": 2, "hidden_size": 64} if args.toy else {"num_layers": 12, "hidden_size": 512}
    heads = {"num_attention_heads": 8, "ffn_hidden_size": sizes["hidden_size"] * 8 // 3 // 16 * 16}
    trainee = Trainee(ModelConfig(preset="tiny-llama", seq_length=64, **sizes, **heads))
    repeats = 1 if args.toy else args.repeats
    trainee.step()
    plain = statistics.median(trainee.step() for _ in range(3)) * 1e3
    kinds = {
        "sync": {"async_save": False, "keep": None},
        "async": {"async_save": True, "keep": None},
        "selective": {"async_save": True, "keep": without_tables},
    }
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="checkpoint_bench_") as folder:
        savers = {
            kind: CheckpointSaver(
                Path(folder) / kind,
                groups=trainee.parallel.groups,
                keep_last=1,
                async_save=settings["async_save"],
            )
            for kind, settings in kinds.items()
        }
        for repeat in range(repeats + 1):  # the first one of each is not counted
            for kind, settings in kinds.items():
                result = measure(trainee, savers[kind], repeat + 1, keep=settings["keep"])
                results[kind] += [result] if repeat else []
        rows = [
            {"kind": kind, "parameters": trainee.parameters, "step_ms": round(plain, 1)}
            | {"paper_ms": _PAPER_MS[kind], "stalls_ms": [round(r["stall_ms"], 1) for r in found]}
            | {name: round(statistics.median(r[name] for r in found), 1) for name in found[0]}
            for kind, found in results.items()
        ]
    stall = {row["kind"]: row["stall_ms"] for row in rows}
    summary = {f"{kind}_ms": milliseconds for kind, milliseconds in stall.items()} | {
        "async_ratio": round(stall["sync"] / stall["async"], 2),
        "selective_ratio": round(stall["sync"] / stall["selective"], 2),
    }
    print(summary)
    command = command_line("tools.bench.checkpoint")
    print(write_result("checkpoint", command, rows, summary, folder=args.output))


if __name__ == "__main__":
    main()
