"""What the SGLang engine is told, and the arguments of `sglang.Engine` that follow from it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_tlt.types import OFF, Strategy


@dataclass(kw_only=True, slots=True)
class SglangConfig:
    """Sizes and limits of the engine."""

    max_model_len: int = 1024
    """Longest prompt plus response, in tokens."""
    max_running_requests: int = 32
    """Most requests that decode at the same time."""
    max_total_tokens: int | None = None
    """Rows of the key/value cache; default: what max_running_requests need on a CPU, what fits on a GPU."""
    tp_size: int = 1
    """GPUs of one engine: the ranks of the training's tensor-parallel group."""
    dtype: torch.dtype = torch.float32
    """Type of weights and cache."""
    strategy: Strategy = OFF
    """How every step speculates; its drafter is off, eagle (1/2/3, by the drafter's layout) or ngram."""
    adaptive_steps: tuple[int, ...] = ()
    """Numbers of draft steps that the bandit chooses from, strategy.num_steps among them, 0 meaning off;
    empty: always strategy. For chains (topk 1) only, as SGLang has it."""
    seed: int = 0
    """Seed of the engine's draws."""
    timeout_s: float = 600.0
    """An engine that says nothing for this long is taken for dead."""
    max_restarts: int = 3
    """Engines that may be lost in a run."""
    bucket_bytes: int = 256 * 2**20
    """Weights handed over at a time."""
    weight_transport: Literal["folder", "tensor", "group"] = "folder"
    """How new weights reach a running engine: files; memory shared with it (CUDA IPC on a GPU); a broadcast
    over a process group (gloo, or NCCL to an engine on other GPUs, which base_gpu_id in arguments names)."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of sglang.Engine, which win over those made here."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_running_requests", "tp_size", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.timeout_s <= 0 or self.max_restarts < 0:
            raise ValueError(
                f"timeout_s={self.timeout_s} must be positive, max_restarts={self.max_restarts} not negative"
            )
        if self.adaptive_steps and (
            self.strategy.drafter != "eagle"
            or self.strategy.topk != 1
            or self.strategy.num_steps not in self.adaptive_steps
        ):
            raise ValueError(
                f"adaptive_steps={self.adaptive_steps} with strategy {self.strategy}: SGLang 0.5.21 changes "
                "steps of eagle chains (topk=1) only, and starts with num_steps, which must be among them"
            )
        rows = self.max_total_tokens
        if rows is not None and rows < self.max_model_len + self.room + _SPARE:
            raise ValueError(
                f"max_total_tokens={rows} holds no request of max_model_len={self.max_model_len}: it needs "
                f"{self.max_model_len + self.room + _SPARE} rows; raise the one or lower the other"
            )
        if self.weight_transport not in ("folder", "tensor", "group"):
            raise ValueError(f"weight_transport={self.weight_transport!r}: choose folder, tensor or group")
        if self.strategy.drafter not in ("off", "eagle", "ngram"):
            raise ValueError(
                f"SGLang has no drafter {self.strategy.drafter!r}: choose off, eagle or ngram"
            )

    @property
    def room(self) -> int:
        """Tokens that SGLang keeps free for drafts at the end of the context; 0 without speculation."""
        if self.strategy.drafter == "off":
            return 0
        s = self.strategy
        return max(s.num_draft_tokens, s.num_steps * s.topk, *(n + 1 for n in self.adaptive_steps)) + 1


_SPARE = 6
"""SGLang 0.5.21 ends a response 2 tokens before the end of its context (and of its cache), in silence, and
takes prompts up to 7 tokens before it: the context is made longer by what it would not use."""

# Without AMX, SGLang's own CPU backend is torch_native, which cannot draft; the kernels of the other one are
# asked for where speculation runs.
_CPU = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,  # the trainer has the same cores
}  # fmt: skip
_CPU_SPECULATION = {"prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx"}
PLUGIN_VARIABLE = "MEGATRON_TLT_SGLANG"
"""Switches our plugin on in SGLang's processes."""
STATES_VARIABLE = "MEGATRON_TLT_SGLANG_STATES"
"""Has the plugin hand out an EAGLE-3 engine's final states beside the inner ones."""
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
"""No position beyond the model's is ever computed: the engine checks every request, and the drafts' room."""
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
BANDIT_FILE, ORDER_FILE, STEPS_FILE = "bandit.json", "bandit_order.json", "adaptive.json"
"""State of the bandit inside SGLang, one that it is to go on from, and its candidates in SGLang's form."""


def engine_environment(config: SglangConfig, *, device: str, eagle3: bool) -> dict[str, str]:
    """Variables of the engine's process."""
    found = {PLUGIN_VARIABLE: "1", _LONGER_CONTEXT: "1"} | ({STATES_VARIABLE: "1"} if eagle3 else {})
    if device == "cuda":
        return found
    found |= _CPU_ENVIRONMENT
    if config.tp_size > 1 and _CORES not in os.environ:  # SGLang wants a NUMA node each, or to be told
        cores = sorted(os.sched_getaffinity(0))
        chosen = [cores[i * len(cores) // config.tp_size] for i in range(config.tp_size)]
        found[_CORES] = "|".join(map(str, chosen))
    return found


def engine_arguments(
    config: SglangConfig, *, device: str, target: Path, draft: Path | None, eagle3: bool
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`. `target`, `draft`: folders with `config.json` and weights."""
    arguments: dict[str, Any] = {
        "model_path": str(target), "skip_tokenizer_init": True, "skip_server_warmup": True,
        "dtype": str(config.dtype).removeprefix("torch."), "tp_size": config.tp_size,
        "context_length": config.max_model_len + config.room + _SPARE,
        "max_running_requests": config.max_running_requests,
        "random_seed": config.seed, "enable_return_hidden_states": True, "log_level": "error",
    }  # fmt: skip
    strategy = config.strategy
    rows = config.max_total_tokens
    if rows is None and device == "cpu":
        rows = config.max_running_requests * (config.max_model_len + 2 * config.room + _SPARE)
    if rows is not None:
        arguments["max_total_tokens"] = rows
    if device == "cpu":
        arguments |= _CPU
    if strategy.drafter != "off":
        arguments |= _speculation(strategy, eagle3=eagle3, draft=draft)
        arguments |= _CPU_SPECULATION if device == "cpu" else {}
    if config.adaptive_steps:
        path = str(target.parent / STEPS_FILE)
        arguments |= {"speculative_adaptive": True, "speculative_adaptive_config": path}
    return arguments | config.arguments


def _speculation(strategy: Strategy, *, eagle3: bool, draft: Path | None) -> dict[str, Any]:
    if strategy.drafter == "ngram":
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": strategy.num_draft_tokens,
        }
    return {
        "speculative_algorithm": "EAGLE3" if eagle3 else "EAGLE",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": strategy.num_steps,
        "speculative_eagle_topk": strategy.topk,
        "speculative_num_draft_tokens": strategy.num_draft_tokens,
    }
