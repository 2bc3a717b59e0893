"""lm-eval's tasks on a checkpoint, or on two side by side, offline from local files, under any TP, PP and DP.

`HF_HUB_OFFLINE=1 python -m megatron_tlt.evaluation.harness --load checkpoints/ --data_dir data/
--include_path examples/eval_tasks --tasks [blimp_local_anaphor,lambada_local]`. The one importer of the
optional package `lm_eval`. Every rank runs the same harness; the data-parallel replicas share the requests.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from megatron_tlt import device
from megatron_tlt.bridge.load import LoadedModel, dtype_of, load_model
from megatron_tlt.data.tokenizer import TokenizerConfig, build_tokenizer, require_eod
from megatron_tlt.entry import run_entry
from megatron_tlt.evaluation.decoding import DecodingConfig, generate_tokens
from megatron_tlt.evaluation.scoring import cut_windows
from megatron_tlt.files import write_json
from megatron_tlt.models.logits import score_tokens
from megatron_tlt.parallel import Parallel, ParallelConfig

import lm_eval
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

_DEFAULT_NEW_TOKENS = 256  # lm-eval's own default for generate_until
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(kw_only=True, slots=True)
class HarnessConfig:
    """Which tasks on which models."""

    load: str
    """Checkpoint folder (the newest iter_*), one iter_* folder, or a Hugging Face folder."""
    tasks: list[str]
    """Names of lm-eval tasks."""
    parallel: ParallelConfig
    """Layout over the ranks."""
    include_path: str | None = None
    """Folder of task files (.yaml); then lm-eval's own tasks, which download, are left out."""
    data_dir: str | None = None
    """Folder that the data paths in task files are relative to; default: the current one."""
    compare: str | None = None
    """A second model, shown beside the first."""
    limit: int | None = None
    """Take this many first documents of a task; default all."""
    micro_batch_size: int = 8
    """Sequences per forward pass."""
    seq_length: int | None = None
    """Tokens per window; default: the model's longest, at most 2048."""
    dtype: str | None = None
    """float32, bfloat16 or float16; default: as the weights are stored."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer of both models; default: the one that each checkpoint names."""
    output: str | None = None
    """JSON file to write."""

    def __post_init__(self) -> None:
        for name in ("limit", "micro_batch_size", "seq_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.dtype is not None:
            dtype_of(self.dtype)
        for name in ("include_path", "data_dir"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_dir():
                raise ValueError(f"{name}={folder} is no folder")


class HarnessModel(TemplateLM):
    """A loaded model as lm-eval sees it. Raises ValueError for a model without tokenizer or without an
    end-of-document token, and for windows longer than the model can take."""

    def __init__(
        self,
        loaded: LoadedModel,
        parallel: Parallel,
        *,
        micro_batch_size: int = 8,
        seq_length: int | None = None,
    ) -> None:
        super().__init__()
        longest = loaded.model.max_position_embeddings
        if loaded.tokenizer is None:
            raise ValueError("the model names no tokenizer: give tokenizer.tokenizer_type")
        if seq_length is not None and seq_length > longest:
            raise ValueError(f"seq_length={seq_length} exceeds the model's longest, {longest}")
        if parallel.config.sequence_parallel:
            raise ValueError("evaluation needs parallel.sequence_parallel=false")
        self._loaded, self._parallel, self._batch_size = loaded, parallel, micro_batch_size
        self._text = build_tokenizer(loaded.tokenizer)
        self._eod = require_eod(self._text)
        self._seq_length = min(longest, 2048) if seq_length is None else seq_length
        for chunk in loaded.chunks:
            chunk.eval()

    @property
    def eot_token_id(self) -> int:
        return self._eod

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        return self._text.tokenize(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """A context too long for the window loses its beginning."""
        windows = [((*context, *target), len(target)) for _, context, target in requests]
        too_long = max((count for _, count in windows), default=0)
        if too_long > self._seq_length:
            raise ValueError(f"an answer of {too_long} tokens exceeds seq_length={self._seq_length}")
        return self._score([(ids[-self._seq_length - 1 :], count) for ids, count in windows])

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Whole documents, cut as `python -m megatron_tlt.evaluate` does with stride = seq_length."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = [self._eod, *self._text.tokenize(request.args[0])]
            size = self._seq_length
            for window in cut_windows(ids, seq_length=size, stride=size):
                windows.append((tuple(window.ids), window.counted))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(owners, self._score(windows), strict=True):
            totals[owner] += log_prob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._share(requests, lambda part: [self._generate(*r.args) for r in part])

    def _generate(self, context: str, options: dict[str, object]) -> str:
        """Text after `context`, up to the first stop string, which is left out."""
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        sampled = bool(options.get("do_sample", False))
        config = DecodingConfig(
            max_new_tokens=int(options.get("max_gen_toks", _DEFAULT_NEW_TOKENS)),
            temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
            top_p=float(options.get("top_p", 1.0)) if sampled else 1.0,
        )
        room = self._loaded.model.max_position_embeddings - config.max_new_tokens
        if room < 1:
            raise ValueError(f"max_gen_toks={config.max_new_tokens} leaves no room for a prompt")
        prompt = self._text.tokenize(context)[-room:] or [self._eod]
        ids: list[int] = []
        for token in generate_tokens(
            self._loaded.chunks, self._parallel, prompt, config, eos=self._text.eos
        ):
            if token == self._text.eos:
                break
            ids.append(token)
            text = self._text.detokenize(ids)
            if any(stop in text for stop in stops):
                break
        text = self._text.detokenize(ids)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

    def _score(self, windows: list[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """(nats, all greedy) of the last `count` tokens of each `(ids, count)`."""
        # Windows of like length share a batch: little padding.
        order = sorted(range(len(windows)), key=lambda i: (-len(windows[i][0]), i))
        size = self._batch_size
        batches = [[windows[i] for i in order[a : a + size]] for a in range(0, len(order), size)]
        scored = self._share(batches, lambda part: [self._score_batch(b) for b in part])
        found = [pair for batch in scored for pair in batch]
        return [pair for _, pair in sorted(zip(order, found, strict=True))]

    def _score_batch(self, batch: list[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        longest = max(len(ids) for ids, _ in batch)
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in batch])
        padded = padded.to(device.device())
        log_probs, greedy = score_tokens(
            self._loaded.chunks, self._parallel, padded[:, :-1], padded[:, 1:]
        )
        log_probs, greedy = log_probs.cpu().double(), greedy.cpu()
        spans = [slice(len(ids) - 1 - count, len(ids) - 1) for ids, count in batch]
        return [
            (float(log_probs[row, span].sum()), bool(greedy[row, span].all()))
            for row, span in enumerate(spans)
        ]

    def _share(
        self, items: list[Item], work: Callable[[list[Item]], list[Result]]
    ) -> list[Result]:
        """`work(items)`, each data-parallel replica doing its part; the whole on every rank."""
        rank, size = self._parallel.dp_rank, self._parallel.dp_size
        mine = work(items[rank::size])
        if size == 1:
            return mine
        parts: list = [None] * size
        dist.all_gather_object(parts, mine, group=self._parallel.groups.dp)
        return [parts[i % size][i // size] for i in range(len(items))]


def run_tasks(config: HarnessConfig, parallel: Parallel) -> dict[str, dict[str, dict[str, float]]]:
    """model -> task -> metric -> value; one model in memory at a time. Collective over the world.

    Raises ValueError for a task that does not exist and for what cannot be loaded.
    """
    include_path = config.include_path and str(Path(config.include_path).absolute())
    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    unknown = sorted(set(config.tasks) - set(manager.all_tasks))
    if unknown:
        raise ValueError(f"no tasks named {unknown}; there are {manager.all_tasks[:20]}")
    dtype = dtype_of(config.dtype) if config.dtype else None
    results = {}
    for path in dict.fromkeys(p for p in (config.load, config.compare) if p is not None):
        model = HarnessModel(
            load_model(path, parallel, dtype=dtype, tokenizer=config.tokenizer),
            parallel,
            micro_batch_size=config.micro_batch_size,
            seq_length=config.seq_length,
        )
        with contextlib.chdir(config.data_dir or "."):
            found = lm_eval.simple_evaluate(
                model, tasks=config.tasks, task_manager=manager, limit=config.limit,
                bootstrap_iters=0, log_samples=False,
            )  # fmt: skip
        results[path] = {task: _numbers(values) for task, values in found["results"].items()}
    return results


def _numbers(values: dict[str, object]) -> dict[str, float]:
    """The metrics without their errors; "acc,none" is "acc"."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "," in name and "_stderr" not in name
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """One row a task and metric, one column a model."""
    models = list(results)
    lines = [["task", "metric", *(Path(model).name for model in models)]]
    for task, metrics in results[models[0]].items():
        for metric in metrics:
            lines.append([task, metric, *(f"{results[m][task][metric]:.4f}" for m in models)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for bad input (said in one line)."""
    return run_entry(
        HarnessConfig,
        run,
        prog="python -m megatron_tlt.evaluation.harness",
        description=__doc__,
        arguments=arguments,
    )


def run(config: HarnessConfig, parallel: Parallel) -> None:
    """Run the tasks, and on rank 0 print the table and write `output`. Collective over the world."""
    results = run_tasks(config, parallel)
    if parallel.rank == 0:
        print(table(results), flush=True)
        if config.output is not None:
            write_json(Path(config.output), {"config": asdict(config), "results": results})


if __name__ == "__main__":
    sys.exit(main())
