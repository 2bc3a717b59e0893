"""RL runs as tasks for gloo workers: a model of 200k parameters, prompts of numbers, results returned."""

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

from megatron_tlt import sft
from megatron_tlt.data.prompts import PromptDataConfig
from megatron_tlt.data.rewards import RewardConfig, RewardResult
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.draft.trainer import DrafterTrainerConfig
from megatron_tlt.draft.trigger import TriggerConfig
from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models.hf_config import architecture_of_model
from megatron_tlt.models.hf_stream import export_hf
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.rl.algorithms import AlgorithmConfig
from megatron_tlt.rl.config import (
    DraftingConfig,
    EvaluationConfig,
    RlConfig,
    RlTrainingConfig,
    RolloutConfig,
)
from megatron_tlt.rl.dump import Sample, read_dump, write_dump
from megatron_tlt.rl.loop import train
from megatron_tlt.rl.setup import RlRun, build_run
from megatron_tlt.rl.weight_sync import WeightSyncError
from megatron_tlt.sft import SftConfig
from megatron_tlt.train.checkpoint import CheckpointConfig
from megatron_tlt.train.config import LoggingConfig
from megatron_tlt.train.optimizer import OptimizerConfig
from megatron_tlt.train.sft import SftDataConfig, SftTrainingConfig
from megatron_tlt.train.stop import StopRequests
from megatron_tlt.types import FinishReason, Rollout

import torch

VOCAB, END = 60, 60  # a NullTokenizer of 60 ids, and its end of document
REWARD = "tests.dist.rl_reward:share_of_small_numbers"
ONE: dict = {}
TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}


def write_prompts(path: Path, count: int = 12) -> Path:
    rows = [
        {"prompt": " ".join(str((7 * i + 3 * j) % VOCAB) for j in range(2 + i % 5)), "label": ""}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rl_config(root: Path, **sections) -> RlConfig:
    """4 prompts x 4 responses of up to 16 tokens a step; `sections` override single fields."""

    def of(cls, **defaults):
        return cls(**defaults | sections.pop(cls.__name__, {}))

    data = of(PromptDataConfig, prompt_data=[str(root / "prompts.jsonl")], add_bos=False)
    return RlConfig(
        parallel=of(ParallelConfig),
        data=data,
        rewards=of(RewardConfig, reward=REWARD, num_workers=1, timeout_s=60.0),
        rollout=of(
            RolloutConfig, rollout_batch_size=4, n_samples_per_prompt=4, max_response_len=16,
            max_running_requests=8,
        ),
        algorithm=of(AlgorithmConfig),
        training=of(RlTrainingConfig, train_iters=2, max_tokens_per_gpu=64),
        evaluation=of(EvaluationConfig),
        # A large epsilon: Adam would blow up the rounding of gradients that are nearly 0.
        optimizer=of(
            OptimizerConfig, lr=1e-3, lr_decay_style="constant", clip_grad=0.5, adam_eps=1e-6
        ),
        checkpoint=of(CheckpointConfig),
        logging=of(LoggingConfig, log_dir=str(root / "logs"), tensorboard_dir=str(root / "tb")),
        drafter=of(
            DraftingConfig, micro_rows=64, buffer_rows=1024, trigger=TriggerConfig(),
            trainer=DrafterTrainerConfig(lr=3e-3, num_passes=2, lr_warmup_iters=0),
        ),
        model=of(ModelConfig, preset="tiny-llama", max_position_embeddings=128),
        tokenizer=of(TokenizerConfig, tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        **sections,
    )  # fmt: skip


def start(root: Path, layout: dict, **sections) -> RlRun:
    torch.set_num_threads(1)
    config = rl_config(Path(root), ParallelConfig=layout, **sections)
    return build_run(config, init_parallel(config.parallel, seed=1))


def weights_of(run: RlRun) -> dict[str, torch.Tensor]:
    """The whole policy under Hugging Face names, on every rank."""
    architecture = architecture_of_model(run.policy.config)
    exported = export_hf(run.policy.model, run.parallel, architecture=architecture)
    return {name: tensor.clone() for name, tensor in exported}


def run_loop(root: Path, layout: dict, sections: dict) -> dict:
    """Train to the end; weights, counters, and what the cursor says."""
    run = start(root, layout, **sections)
    state = train(run)
    weights = weights_of(run)
    return {
        "weights": weights if run.parallel.rank == 0 else None,
        "iteration": state.iteration,
        "samples": state.consumed_train_samples,
        "cursor": run.cursor.consumed,
    }


class Killed(BaseException):
    """Stands for a signal that ends the process."""


def run_until_killed(root: Path, layout: dict, sections: dict, *, phase: str, iteration: int) -> None:
    """Train until `phase` begins in the step after `iteration`, and die there."""
    run = start(root, layout, **sections)

    def bomb(begins: str) -> None:
        if begins == phase and run.state.iteration == iteration:
            raise Killed

    run.clock.watch = bomb
    try:
        train(run)
    except Killed:
        return
    raise AssertionError(f"phase {phase} never began")


def run_until_signalled(root: Path, sections: dict, *, iteration: int, phase: str) -> int:
    """SIGTERM comes in `phase` of the step after `iteration`; the iteration at which the run ended."""
    run, stop = start(root, ONE, **sections), StopRequests()

    def ask(begins: str) -> None:
        if begins == phase and run.state.iteration == iteration:
            os.kill(os.getpid(), signal.SIGTERM)

    run.clock.watch = ask
    with stop.listening():
        state = train(run, stop=stop)
    assert stop.reason == "SIGTERM was received"
    return state.iteration


def read_metrics(root: Path, kind: str = "train") -> list[dict]:
    lines = (Path(root) / "logs" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def write_fixed_dump(folder: Path, *, seed: int = 0) -> list[Sample]:
    """One step of 4 groups of 4 with lengths 0 to 16, one flat group, an aborted and a truncated response."""
    rng = random.Random(seed)
    samples = []
    for group in range(4):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(2 + 3 * group))
        for number in range(4):
            length = rng.choice((1, 3, 8, 16)) if (group, number) != (2, 1) else 0
            samples.append(
                Sample(
                    group=group,
                    rollout=Rollout(
                        prompt_id=group,
                        sample_index=number,
                        prompt_tokens=prompt,
                        tokens=tuple(rng.randrange(VOCAB) for _ in range(length)),
                        log_probs=tuple(-4.1 + 0.1 * rng.random() for _ in range(length)),
                        weight_versions=(0,) * length,
                        finish_reason=FinishReason.LENGTH if length == 16 else FinishReason.STOP,
                    ),
                    reward=RewardResult(score=0.5 if group == 1 else rng.random()),
                )
            )
    samples[5] = replace(samples[5], reward=RewardResult(error="the verifier died"))
    samples[14] = replace(
        samples[14], rollout=replace(samples[14].rollout, finish_reason=FinishReason.ABORT)
    )
    write_dump(folder, 1, samples)
    assert read_dump(folder, 1) == samples
    return samples


def run_sft(root: Path, folder: Path, layout: dict, training: dict) -> int:
    """Fine-tune a random model on `root`/sft.jsonl to the end; the same folder again goes on."""
    torch.set_num_threads(1)
    checkpoint = str(Path(folder) / "checkpoint")
    config = SftConfig(
        parallel=ParallelConfig(**layout),
        data=SftDataConfig(train_data_path=[str(Path(root) / "sft.jsonl")]),
        training=SftTrainingConfig(
            **{"train_iters": 6, "global_batch_size": 8, "max_tokens_per_gpu": 40} | training
        ),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant", adam_eps=1e-6),
        checkpoint=CheckpointConfig(save=checkpoint, load=checkpoint),
        logging=LoggingConfig(log_interval=1, log_dir=str(Path(folder) / "logs")),
        model=ModelConfig(preset="tiny-llama"),
        tokenizer=TokenizerConfig(),
    )
    inputs = sft.read_inputs(config)
    parallel = init_parallel(config.parallel, seed=1)
    trainer, policy = sft.build_trainer(config, inputs, parallel)
    state = sft.restored_state(config, inputs, trainer, policy)
    assert sft.run(config, trainer, policy, state, parallel)
    return state.iteration


def train_with_stale_engine(root: Path, sections: dict) -> None:
    """The engine keeps the first weights, whatever is published."""
    run = start(root, ONE, **sections)
    load = run.engine.update_weights

    def keep_first(which, tensors, *, version: int) -> None:
        if version == 0:
            load(which, tensors, version=version)
        for _ in tensors:
            pass

    run.engine.update_weights = keep_first
    train(run)


def publish_differently(root: Path) -> str:
    """Rank 1's weights are another's, as after a lost update; what publishing says."""
    root = Path(root) / str(torch.distributed.is_initialized() and torch.distributed.get_rank())
    root.mkdir()
    write_prompts(root / "prompts.jsonl")
    run = start(root, ONE, RolloutConfig={"check_weight_update": True, "rollout_batch_size": 4})
    with torch.no_grad():
        next(run.policy.model[0].parameters()).add_(1e-3 * run.parallel.rank)
    try:
        run.publisher.publish(run.engine, version=5)
    except WeightSyncError as error:
        return str(error)
    finally:
        run.close()
    return ""


def train_without_encoder(root: Path) -> None:
    """Two steps in which asking the tokenizer to encode is an error."""
    run = start(root, ONE)

    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("text was encoded")

    run.tokenizer.tokenize = encode
    train(run)
