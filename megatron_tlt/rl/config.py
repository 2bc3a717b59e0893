"""What an RL run is told. Every key here is a key of the YAML file and of the command line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_tlt import device
from megatron_tlt.data.prompts import PromptDataConfig
from megatron_tlt.data.rewards import RewardConfig
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.draft.trainer import DrafterTrainerConfig
from megatron_tlt.draft.trigger import TriggerConfig
from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.parallel import ParallelConfig
from megatron_tlt.rl.algorithms import AlgorithmConfig
from megatron_tlt.train.checkpoint import CheckpointConfig
from megatron_tlt.train.config import LoggingConfig
from megatron_tlt.train.optimizer import OptimizerConfig

import torch

Speculation = Literal["off", "ngram", "frozen", "tlt"]


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """How responses are generated (slime's spelling)."""

    rollout_batch_size: int
    """Prompts per step."""
    n_samples_per_prompt: int = 8
    """Responses per prompt: the group."""
    max_response_len: int = 256
    """Longest response in tokens."""
    temperature: float = 1.0
    """Of the draws, and of the log-probabilities that are trained; 0 is greedy."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Draw among the k likeliest tokens; 0: no limit."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, beside the tokenizer's end of sequence."""
    schedule: Literal["static", "shared"] = "static"
    """Prompts are dealt out to the engines beforehand, or pulled by them from a shared queue."""
    max_running_requests: int = 64
    """Most responses that an engine decodes at the same time."""
    kv_cache_gib: float | None = None
    """Bound on an engine's key/value cache per rank; default: what max_running_requests need."""
    offload_rollout: bool | None = None
    """Give the key/value cache's memory to the training between rollouts; default: on a GPU."""
    sync_bucket_mib: int = 256
    """Whole tensors in flight while weights are published."""
    check_weight_update: bool = False
    """Compare a SHA-256 of the published weights over all engines."""
    engine: Literal["native", "sglang"] = "native"
    """The embedded engine, or SGLang in a process beside each rank (launch/sglang_environment.sh)."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Further arguments of sglang.Engine, such as mem_fraction_static, under SGLang's names."""
    weight_transport: Literal["folder", "tensor", "group"] = "folder"
    """How weights reach a running SGLang: files on the machine; the trainer's memory (CUDA IPC on a GPU); a
    broadcast over gloo."""
    trace_interval: int = 10
    """Every how many steps the rollout's decode steps and requests go to the timeline; 0: never."""

    @property
    def offloads(self) -> bool:
        """`offload_rollout`, or its default here."""
        return device.is_cuda() if self.offload_rollout is None else self.offload_rollout

    def __post_init__(self) -> None:
        for name in (
            "rollout_batch_size",
            "n_samples_per_prompt",
            "max_response_len",
            "max_running_requests",
            "sync_bucket_mib",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be at least 1")
        if self.trace_interval < 0:
            raise ValueError(f"rollout.trace_interval={self.trace_interval} must not be negative (0: never)")
        if self.weight_transport != "folder" and self.engine != "sglang":
            raise ValueError(
                f"rollout.weight_transport={self.weight_transport} is for rollout.engine=sglang: the "
                "embedded engine takes the trainer's tensors themselves"
            )
        if self.weight_transport == "group" and device.is_cuda():
            raise ValueError(
                "rollout.weight_transport=group: NCCL refuses two processes on one GPU, and an engine shares "
                "those of its ranks; use tensor (CUDA IPC)"
            )

    @property
    def num_samples(self) -> int:
        """Responses per step."""
        return self.rollout_batch_size * self.n_samples_per_prompt


@dataclass(kw_only=True, slots=True)
class RlTrainingConfig:
    """The loop, and how a batch is cut."""

    train_iters: int
    """Steps of the whole run (generate, then update), those before a resume included."""
    global_batch_size: int | None = None
    """Responses per optimizer update; default all of a step. rollout_batch_size x n_samples_per_prompt
    must be a multiple."""
    num_epochs: int = 1
    """Passes over the responses of a step."""
    max_tokens_per_gpu: int = 8192
    """Tokens of one packed micro-batch, at most."""
    reuse_forward: bool = True
    """With one update a step, take old log-probabilities from its own forward pass, not from one before."""
    skip_zero_advantage: bool = True
    """Leave out of the update what has no gradient: groups with equal rewards and responses that do not
    count, unless KL, entropy bonus or whitening give them one. Nothing is learned differently; metrics of
    log-probabilities and entropy are those of the responses that were computed."""
    seed: int = 1234
    """Seed of prompt order and of the draws."""
    bf16: bool = False
    """Weights and activations in bfloat16, with fp32 master weights and gradient sums; else fp32."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or core attention."""
    exit_duration_in_mins: float | None = None
    """Save and end the run after the step in which this time is over."""
    memory_budget_gib: float = 0.0
    """Most memory that a phase may use; 0: no bound."""

    def __post_init__(self) -> None:
        for name in ("train_iters", "num_epochs", "max_tokens_per_gpu"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)} must be at least 1")

    @property
    def params_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out prompts, scored by the same rewards."""

    sets: dict[str, list[str]] = field(default_factory=dict)
    """Files by name of the set; rows are read as those of data.prompt_data."""
    interval: int | None = None
    """Steps between evaluations; none: before the first and after the last step only."""
    before_training: bool = True
    """Evaluate before the first step."""
    n_samples: int = 1
    """Responses per prompt, k of avg@k and pass@k."""
    max_prompts: int = 0
    """Prompts per set, the first ones; 0: all."""
    temperature: float = 1.0
    """Of the draws; 0 is greedy."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    max_response_len: int | None = None
    """Longest response in tokens; default: that of training."""


@dataclass(kw_only=True, slots=True)
class DraftingConfig:
    """The drafter of speculation frozen and tlt, and its training on ranks that have nothing else to do."""

    trainer: DrafterTrainerConfig
    """Loss and optimizer."""
    trigger: TriggerConfig
    """When training is worth it."""
    layout: Literal["eagle", "eagle3"] = "eagle"
    """EAGLE-1/2, or EAGLE-3 (three inner states, a head of its own; targets of 7 layers and more)."""
    path: str | None = None
    """Folder of a drafter to start from (tools/train_drafter.py); default: random weights, for tlt only."""
    idle_ranks: int = 1
    """Ranks without requests from which on they train."""
    micro_rows: int = 512
    """Rows of one update: what a rollout may have to wait for."""
    min_updates: int = 0
    """Updates that each rank makes in a step even without idle time; they are on the critical path."""
    max_passes: float = 4.0
    """Passes over the lessons in one step, at most: more would learn them by heart."""
    buffer_rows: int = 32768
    """States of responses that a rank keeps to train on."""
    kept_share: float = 0.5
    """Share of them for the longest responses of the step before."""
    reward_weight: float = 0.0
    """A kept response weighs 1 plus this times its reward, where that is above 0."""

    def __post_init__(self) -> None:
        if min(self.min_updates, self.reward_weight) < 0 or self.idle_ranks < 1 or self.max_passes <= 0:
            raise ValueError(
                f"drafter.idle_ranks={self.idle_ranks}, min_updates={self.min_updates}, reward_weight="
                f"{self.reward_weight}, max_passes={self.max_passes}: need idle_ranks >= 1, min_updates "
                ">= 0, reward_weight >= 0, max_passes > 0"
            )
        if not 2 <= self.micro_rows <= self.buffer_rows or not 0 <= self.kept_share <= 1:
            raise ValueError(
                f"drafter.micro_rows={self.micro_rows}, buffer_rows={self.buffer_rows}, kept_share="
                f"{self.kept_share}: need 2 <= micro_rows <= buffer_rows and a share of 0 to 1"
            )


@dataclass(kw_only=True, slots=True)
class RlConfig:
    """An RL run: the policy trains and generates on the same ranks."""

    parallel: ParallelConfig
    """Layout over the ranks."""
    data: PromptDataConfig
    """Prompts."""
    rewards: RewardConfig
    """Rewards."""
    rollout: RolloutConfig
    """Generation."""
    algorithm: AlgorithmConfig
    """Advantages and loss."""
    training: RlTrainingConfig
    """The loop."""
    evaluation: EvaluationConfig
    """Held-out sets."""
    optimizer: OptimizerConfig
    """AdamW, schedules, gradient reduction."""
    checkpoint: CheckpointConfig
    """Saving and loading; load takes a checkpoint of any stage, or a Hugging Face folder."""
    logging: LoggingConfig
    """Log line, metrics files."""
    drafter: DraftingConfig
    """The drafter of speculation frozen and tlt."""
    model: ModelConfig | None = None
    """Shape of the model; default: the checkpoint's."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer; default: the one that the checkpoint names."""
    pretrained_checkpoint: str | None = None
    """Where the weights come from while checkpoint.load is the still empty folder of checkpoint.save."""
    speculation: Speculation = "off"
    """off; ngram: drafts from what the prompt's other responses said; frozen: a trained drafter too, which
    stays as it is; tlt: it learns from the responses while ranks wait in the tail of a rollout. Every decode
    step takes what measures fastest, plain decoding included; no token changes."""
    save_debug_rollout_data: str | None = None
    """Folder for a JSON-lines file a step with every response, its reward and log-probabilities."""
    load_debug_rollout_data: str | None = None
    """Folder that debug_train_only reads."""
    debug_rollout_only: bool = False
    """Generate and score, write save_debug_rollout_data, train nothing."""
    debug_train_only: bool = False
    """Train on the responses in load_debug_rollout_data; generate nothing."""

    def __post_init__(self) -> None:
        if self.debug_rollout_only and self.debug_train_only:
            raise ValueError("debug_rollout_only and debug_train_only exclude each other")
        if self.debug_train_only != (self.load_debug_rollout_data is not None):
            raise ValueError("debug_train_only and load_debug_rollout_data go together")
        if self.debug_rollout_only and self.save_debug_rollout_data is None:
            raise ValueError("debug_rollout_only needs save_debug_rollout_data")
        if self.evaluation.sets and self.debug_train_only:
            raise ValueError("debug_train_only has no engine to evaluate with: leave evaluation.sets out")
        if self.rollout.engine == "sglang" and self.speculation == "ngram":
            raise ValueError(
                "speculation=ngram with rollout.engine=sglang: SGLang 0.5.21 has one algorithm from start "
                "to end, and its n-grams cannot be switched off; set off, frozen or tlt, or "
                "rollout.engine=native"
            )
        if self.speculation == "frozen" and self.drafter.path is None:
            raise ValueError(
                "speculation=frozen needs drafter.path, a trained drafter: tools/train_drafter.py makes one"
            )
        if self.speculation == "tlt" and self.debug_rollout_only:
            raise ValueError("debug_rollout_only trains nothing: use speculation=frozen, ngram or off")
        samples, size = self.rollout.num_samples, self.global_batch_size
        if size < 1 or samples % size:
            raise ValueError(
                f"rollout_batch_size {self.rollout.rollout_batch_size} x n_samples_per_prompt "
                f"{self.rollout.n_samples_per_prompt} = {samples} responses are no multiple of "
                f"training.global_batch_size={size}: change one of them"
            )
        if self.rollout.temperature == 0 and not self.debug_rollout_only:
            raise ValueError("rollout.temperature=0 gives n equal responses: nothing to learn; raise it")

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter with weights."""
        return self.speculation in ("frozen", "tlt")

    @property
    def global_batch_size(self) -> int:
        """Responses per optimizer update."""
        return self.training.global_batch_size or self.rollout.num_samples

    def check(self, world_size: int) -> None:
        """All checks that need neither files nor a process group. Raises ValueError with the numbers."""
        self.parallel.data_parallel_size(world_size)
        self.optimizer.schedule_iters(self.training.train_iters)
        if self.model is not None:
            self.model.check_layout(self.parallel)

    @property
    def log_dir(self) -> Path:
        if self.logging.log_dir is not None:
            return Path(self.logging.log_dir)
        return Path(self.checkpoint.save or ".") / "logs"

    @property
    def tensorboard_dir(self) -> Path:
        given = self.logging.tensorboard_dir
        return Path(given) if given is not None else self.log_dir / "tensorboard"
