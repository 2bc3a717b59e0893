"""Pretraining runs as tasks for gloo workers: small, in memory, every step's numbers returned."""

import json
from pathlib import Path

from megatron_tlt.data.pretrain import DataConfig
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.train.checkpoint import CheckpointConfig
from megatron_tlt.train.config import LoggingConfig, PretrainConfig, TrainingConfig
from megatron_tlt.train.optimizer import OptimizerConfig
from megatron_tlt.train.pretrain import pretrain
from megatron_tlt.train.profiling import ProfilingConfig
from megatron_tlt.train.setup import build_run
from megatron_tlt.train.watchdog import TimeoutConfig

import torch
from megatron.core.dist_checkpointing import load_plain_tensors

TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = DISTRIBUTED | {
    "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000
}  # fmt: skip


def run_config(log_dir, *, preset="tiny-gpt2", **sections: dict) -> PretrainConfig:
    """A run of 6 steps of 8 mock samples; `sections` override single fields."""
    model = {"preset": preset} | sections.get("model", {})
    training = {
        "train_iters": 6, "global_batch_size": 8, "micro_batch_size": 2, "eval_iters": 1,
    } | sections.get("training", {})  # fmt: skip
    optimizer = {"lr": 1e-3, "lr_warmup_iters": 2, "end_weight_decay": 0.3,
                 "weight_decay_incr_style": "linear"} | sections.get("optimizer", {})  # fmt: skip
    data = {"mock_data": True, "num_workers": 0} | sections.get("data", {})
    return PretrainConfig(
        model=ModelConfig(**model),
        parallel=ParallelConfig(**sections.get("parallel", {})),
        tokenizer=TokenizerConfig(**sections.get("tokenizer", {})),
        data=DataConfig(**data),
        training=TrainingConfig(**training),
        est=EstConfig(**sections.get("est", {})),
        precision=PrecisionConfig(**sections.get("precision", {})),
        optimizer=OptimizerConfig(**optimizer),
        checkpoint=CheckpointConfig(**sections.get("checkpoint", {})),
        logging=LoggingConfig(log_interval=1, log_dir=str(log_dir), peak_tflops=1.0),
        timeouts=TimeoutConfig(**sections.get("timeouts", {})),
        profiling=ProfilingConfig(**sections.get("profiling", {})),
    )


def train(log_dir, preset="tiny-gpt2", sections: dict | None = None) -> dict:
    """Run it on this rank; the result is the same on every rank but for what `metrics` reads."""
    torch.set_num_threads(1)
    config = run_config(log_dir, preset=preset, **(sections or {}))
    parallel = init_parallel(config.parallel, seed=config.training.seed)
    run = build_run(config, parallel)
    state = pretrain(run)
    groups = run.optimizer.param_groups
    return {
        "iteration": state.iteration,
        "samples": state.consumed_train_samples,
        "weight_decay": max((group["weight_decay"] for group in groups), default=None),
    }


def read_metrics(log_dir, kind: str = "train") -> list[dict]:
    lines = (Path(log_dir) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def steps(log_dir) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, learning rate) of every step."""
    return [(m["lm loss"], m["grad-norm"], m["learning-rate"]) for m in read_metrics(log_dir)]


def largest_difference(ours, theirs) -> float:
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) for x, y in zip(ours, theirs) for a, b in zip(x, y))


def checkpoint_tensors(folder) -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint by its name: weights and moments. In a world of one rank."""
    init_parallel(ParallelConfig(), seed=1)
    return load_plain_tensors(str(folder))
