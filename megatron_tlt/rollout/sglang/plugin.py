"""What runs inside SGLang's processes, by its entry point `sglang.srt.plugins`: exact sampling, our bandit.

Without `MEGATRON_TLT_SGLANG` in the environment, which our engine sets, nothing is changed. On a CPU SGLang
0.5.21 verifies drafts greedily whatever the temperature; here sampled requests take its sampling path, with
the `tree_speculative_sampling_target_only` of `sgl_kernel`. Where `speculative_adaptive` is on, the number of
draft steps comes from `BanditTuner`. With `MEGATRON_TLT_SGLANG_STATES`, for EAGLE-3, a target's final states
follow its three inner ones.
"""

import json
import os
import time
from pathlib import Path

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator, get_tp_group
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from megatron_tlt.files import write_json
from megatron_tlt.rollout.sglang.config import (
    BANDIT_FILE,
    ORDER_FILE,
    PLUGIN_VARIABLE,
    STATES_VARIABLE,
)
from megatron_tlt.rollout.tuner import BanditTuner
from megatron_tlt.types import OFF, Strategy

_SAVE_EVERY = 20
_TARGETS = ("llama.LlamaModel", "qwen2.Qwen2Model", "qwen3.Qwen3Model")


def register() -> None:
    """The entry point."""
    if PLUGIN_VARIABLE not in os.environ:
        return
    utils, worker = "sglang.srt.speculative.eagle_utils", "sglang.srt.speculative.eagle_worker_v2"
    HookRegistry.register(f"{utils}._verify_uses_greedy", verify_uses_greedy, HookType.REPLACE)
    HookRegistry.register(f"{worker}.AdaptiveSpeculativeParams", BanditSteps, HookType.REPLACE)
    if STATES_VARIABLE in os.environ:
        for name in _TARGETS:
            HookRegistry.register(f"sglang.srt.models.{name}.forward", with_final_states, HookType.AFTER)


def with_final_states(result: object, *_: object, **__: object) -> object:
    """A target's states `[t, h]` as the last of those that it captured for EAGLE-3.

    The drafter learns from them. Its own input layer gives them the weight 0 (`store.py`).
    """
    if not isinstance(result, tuple):  # nothing was captured, or another pipeline stage goes on
        return result
    hidden, inner = result
    if isinstance(inner, torch.Tensor):
        return hidden, torch.cat((inner, hidden), dim=-1)
    return hidden, [*inner, hidden]


def verify_uses_greedy(*, is_all_greedy: bool, **_: bool) -> bool:
    """Only greedy requests are verified greedily."""
    return is_all_greedy


class BanditSteps:
    """SGLang's `AdaptiveSpecPolicy`: draft steps by batch size and measured tokens/s, 0 (off) among them.

    SGLang asks before each step and tells the accepted drafts after it; the time in between is the step's.
    `cfg_path`: SGLang's own form, candidates under "1". The bandit's state stands in `bandit.json` beside it:
    read at the start, written every 20 steps. A state in `bandit_order.json`, which the trainer writes, takes
    its place before the next step. With tensor parallelism the first process chooses for all: each has a
    clock of its own, and they must not differ.
    """

    def __init__(self, initial_steps: int, cfg_path: str) -> None:
        config = json.loads(Path(cfg_path).read_text(encoding="utf-8"))
        self.candidate_steps: list[int] = sorted(config["1"]["candidate_steps"])
        self.tuner = BanditTuner([strategy_of(steps) for steps in self.candidate_steps])
        self.state_path, self.order_path = (
            Path(cfg_path).with_name(name) for name in (BANDIT_FILE, ORDER_FILE)
        )
        if self.state_path.exists():
            self.tuner.load_state_dict(json.loads(self.state_path.read_text(encoding="utf-8")))
        self._graphs: list[int] | None = None
        self._chosen, self._leads, self._began = OFF, True, time.perf_counter()

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self._graphs = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """All batch sizes: every bucket of the bandit has every candidate."""
        return self._graphs

    def get_steps_for_batch(self, batch_size: int) -> int:
        group = tensor_parallel_group()
        leads = group is None or group.rank_in_group == 0
        if leads and self.order_path.exists():
            # Renamed first: an order that comes while this one is read is not lost.
            taken = self.order_path.replace(self.order_path.with_suffix(".taken"))
            self.tuner.load_state_dict(json.loads(taken.read_text(encoding="utf-8")))
            write_json(self.state_path, self.tuner.state_dict())
        chosen = self.tuner.select(batch_size).num_steps if leads else 0
        steps = chosen if group is None else group.broadcast_object(chosen, src=0)
        self._chosen, self._leads, self._began = strategy_of(steps), leads, time.perf_counter()
        return steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        if not self._leads:
            return
        tokens = sum(num_correct_drafts_per_req) + len(num_correct_drafts_per_req)
        seconds = time.perf_counter() - self._began
        self.tuner.record(
            self._chosen, batch=len(num_correct_drafts_per_req), tokens=tokens, seconds=seconds
        )
        if self.tuner.decisions % _SAVE_EVERY == 0:
            write_json(self.state_path, self.tuner.state_dict())


def tensor_parallel_group() -> GroupCoordinator | None:
    """SGLang's group of this process; None where it is alone."""
    if not torch.distributed.is_initialized() or get_tp_group().world_size == 1:
        return None
    return get_tp_group()


def strategy_of(steps: int) -> Strategy:
    """The chain of that many drafts; 0 is off."""
    return Strategy(drafter="eagle", num_steps=steps, num_draft_tokens=steps + 1) if steps else OFF
