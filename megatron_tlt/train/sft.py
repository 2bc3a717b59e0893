"""Supervised fine-tuning on prompts and responses: packed sequences, and a loss that counts responses alone.

A step takes the next `global_batch_size` examples of an order that depends on seed and epoch alone, cuts them
into micro-batches of a token budget, and divides by the response tokens of the whole batch, so neither
packing nor the layout changes the gradient.
"""

import hashlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.data.prompts import encode_prompt
from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.models.gpt import GPT
from megatron_tlt.ops.cross_entropy import vocab_parallel_cross_entropy
from megatron_tlt.ops.packing import MicroBatch, plan_micro_batches
from megatron_tlt.parallel import Parallel
from megatron_tlt.train.packed import (
    LogitsFunction,
    build_micro_batches,
    packed_train_step,
    run_packed,
)

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(kw_only=True, slots=True)
class SftDataConfig:
    """Examples: JSON lines with a prompt and a response."""

    train_data_path: list[str]
    """JSON-lines files of training examples, read in this order."""
    valid_data_path: list[str] = field(default_factory=list)
    """JSON-lines files of validation examples; none: no evaluation."""
    prompt_key: str = "prompt"
    """Key of the text before the response."""
    response_key: str = "response"
    """Key of the text to learn."""
    append_eos: bool = True
    """End every response with the tokenizer's end-of-sequence token."""
    add_bos: bool = True
    """Begin every prompt with the tokenizer's BOS, if it has one, as RL does."""
    max_length: int | None = None
    """Longest prompt plus response in tokens; longer examples are left out, and counted. Default: the
    model's longest."""


@dataclass(kw_only=True, slots=True)
class SftTrainingConfig:
    """How long, how much at a time."""

    train_iters: int
    """Optimizer steps of the whole run, those before a resume included."""
    global_batch_size: int
    """Examples per step over all ranks."""
    max_tokens_per_gpu: int = 8192
    """Tokens of one packed micro-batch, at most."""
    seed: int = 1234
    """Seed of the order of the examples, and of weights that are drawn."""
    bf16: bool = False
    """Weights and activations in bfloat16, with fp32 master weights and gradient sums; else fp32."""
    eval_interval: int | None = None
    """Steps between evaluations; none: only after the last step."""
    eval_samples: int = 256
    """Validation examples per evaluation, the first ones; 0: never."""

    def __post_init__(self) -> None:
        for name in ("train_iters", "global_batch_size", "max_tokens_per_gpu"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)} must be at least 1")

    @property
    def params_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Tokenised pairs. `prompts[i]` and `responses[i]` are token ids."""

    prompts: list[list[int]]
    responses: list[list[int]]
    num_too_long: int
    """Examples left out for their length."""

    def __len__(self) -> int:
        return len(self.prompts)

    def identity(self) -> dict[str, object]:
        """Count and digest of the content: equal iff the same examples in the same order."""
        digest = hashlib.sha256(json.dumps([self.prompts, self.responses]).encode()).hexdigest()
        return {"num_examples": len(self), "sha256": digest}


def read_examples(
    paths: Sequence[str], config: SftDataConfig, tokenizer: Tokenizer, *, max_length: int
) -> Examples:
    """Read and tokenise. Raises ValueError naming file and line for what is no example, and when none fits.

    Prompt and response are tokenised apart, for RL continues a prompt's own tokens.
    """
    if config.append_eos and tokenizer.eos is None:
        raise ValueError(
            f"{tokenizer.identity()['type']} has no end-of-sequence token: set data.append_eos=false, "
            "or use a tokenizer that has one"
        )
    end = [tokenizer.eos] if config.append_eos else []
    prompts, responses, too_long = [], [], 0
    for place, record in _records(paths):
        texts = [record.get(key) for key in (config.prompt_key, config.response_key)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{place}: wants text under {config.prompt_key!r} and {config.response_key!r}, has keys "
                f"{sorted(record)}"
            )
        prompt = encode_prompt(tokenizer, texts[0], add_bos=config.add_bos)
        response = tokenizer.tokenize(texts[1]) + end
        if not prompt or not response:
            raise ValueError(f"{place}: prompt or response has no tokens")
        if len(prompt) + len(response) > max_length:
            too_long += 1
            continue
        prompts.append(prompt)
        responses.append(response)
    if not prompts:
        raise ValueError(
            f"{list(paths)} hold no example of at most {max_length} tokens ({too_long} are longer)"
        )
    return Examples(prompts=prompts, responses=responses, num_too_long=too_long)


def _records(paths: Sequence[str]) -> Iterator[tuple[str, dict]]:
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"{path} is no file")
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: is not JSON: {error}") from error
                if not isinstance(record, dict):
                    raise ValueError(f"{path}:{number}: is not a JSON object")
                yield f"{path}:{number}", record


def batch_indices(num_examples: int, *, consumed: int, size: int, seed: int) -> list[int]:
    """The next `size` examples after `consumed`: every epoch visits each once, in an order of its own."""
    chosen: list[int] = []
    while len(chosen) < size:
        epoch, offset = divmod(consumed + len(chosen), num_examples)
        order = list(range(num_examples))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        chosen += order[offset : offset + size - len(chosen)]
    return chosen


@dataclass(kw_only=True, slots=True)
class SftTrainer:
    """One model, one optimizer, one set of examples."""

    config: SftTrainingConfig
    parallel: Parallel
    model: list[GPT]
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    train_data: Examples
    valid_data: Examples | None

    def step(self, *, consumed: int) -> dict[str, float]:
        """One optimizer step on the examples after `consumed`; metrics, the same on every rank.

        A loss or gradient norm that is not finite is returned as it is, and the update is not made.
        """
        config, began = self.config, time.perf_counter()
        chosen = batch_indices(
            len(self.train_data), consumed=consumed, size=config.global_batch_size, seed=config.seed
        )
        batches, counted, total = self._batches(self.train_data, chosen)
        result = packed_train_step(
            self.chunks, self.optimizer, batches, self._loss(batches, counted), parallel=self.parallel
        )
        loss = self._sum(result.reports)
        if result.updated:
            self.scheduler.step(increment=config.global_batch_size)
        return {
            "lm loss": loss,
            "grad-norm": result.grad_norm,
            "learning-rate": max((g["lr"] for g in self.optimizer.param_groups), default=0.0),
            "response-tokens": counted,
            "tokens": total,
            "updated": float(result.updated),
            "iteration-time": time.perf_counter() - began,
        }

    def evaluate(self) -> float | None:
        """Mean loss per response token over the first `eval_samples` validation examples, in nats."""
        if self.valid_data is None or self.config.eval_samples == 0:
            return None
        chosen = range(min(self.config.eval_samples, len(self.valid_data)))
        batches, counted, _ = self._batches(self.valid_data, chosen)
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            loss = self._loss(batches, counted)
            reports = run_packed(
                self.chunks, batches, loss, parallel=self.parallel, forward_only=True
            )
        for chunk in self.chunks:
            chunk.train()
        return self._sum(reports)

    def _batches(
        self, data: Examples, chosen: Sequence[int]
    ) -> tuple[list[MicroBatch], int, int]:
        """(this rank's micro-batches, response tokens and all tokens of the whole batch)."""
        prompts = [data.prompts[i] for i in chosen]
        responses = [data.responses[i] for i in chosen]
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        plan = plan_micro_batches(
            lengths,
            max_tokens=self.config.max_tokens_per_gpu,
            num_ranks=self.parallel.dp_size,
            multiple_of=len(self.chunks) > 1 and self.parallel.groups.pp.size() or 1,
        )
        mine = plan[self.parallel.dp_rank]
        batches = build_micro_batches(prompts, responses, mine, parallel=self.parallel)
        return batches, sum(map(len, responses)), sum(lengths)

    def _loss(self, batches: list[MicroBatch], counted: int) -> LogitsFunction:
        """Cross entropy of response tokens over `counted`, the number of them in the global batch."""
        group, vocab_size = self.parallel.groups.tp, self.model[0].true_vocab_size

        def share(number: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            batch = batches[number]
            losses = vocab_parallel_cross_entropy(
                logits, batch.labels, vocab_size=vocab_size, group=group, consume_logits=True
            )
            loss = (losses * batch.response_mask).sum() / counted
            return loss, loss.detach().clone()

        return share

    def _sum(self, reports: list[torch.Tensor]) -> float:
        """Sum of loss shares over micro-batches and replicas, on every rank."""
        total = torch.zeros((), device=device.device())
        if reports and self.parallel.tp_rank == 0:
            total = torch.stack(reports).sum().float()
        dist.all_reduce(total)
        return float(total)
