"""Subnets in the pretraining loop: the controller of a run, or what stands in its place in a dense one."""

from contextlib import AbstractContextManager, nullcontext

from megatron_tlt.models.backend import local_layer_spec
from megatron_tlt.models.te import te_layer_spec
from megatron_tlt.parallel import Parallel
from megatron_tlt.subnet.controller import EstSubnets
from megatron_tlt.subnet.stats import StepOutcome
from megatron_tlt.train.config import PretrainConfig
from megatron_tlt.train.estimate import flops_per_token

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer


class NoSubnets:
    """`est.schedule: dense`: the plain decoder layer, the whole model in every step, nothing to log."""

    layer_spec = staticmethod(local_layer_spec)
    te_layer_spec = staticmethod(te_layer_spec)

    def __init__(self, flops_per_token: float) -> None:
        self.flops_per_token = flops_per_token

    def attach(self, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
        """The model has nothing that could be switched."""

    def micro_batch_size(self, iteration: int, *, default: int) -> int:
        return default

    def begin_step(self, iteration: int) -> None:
        """Every step is like the last one."""

    def end_step(self, outcome: StepOutcome) -> bool:
        """No stage ends."""
        return False

    def full_model(self) -> AbstractContextManager[None]:
        """The model is always whole."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        return {}

    def stage_rows(self) -> list[dict[str, float]]:
        return []

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Raises ValueError when the checkpoint was trained on subnets."""
        if state:
            raise ValueError(
                f"the checkpoint was trained on subnets (est.schedule={state['schedule']['schedule']}), "
                "this run is dense: give the run's est options as they were, or start with "
                "checkpoint.finetune"
            )


Subnets = EstSubnets | NoSubnets


def build_subnets(config: PretrainConfig, parallel: Parallel, *, vocab_size: int) -> Subnets:
    """The subnets of a run with a tokenizer of `vocab_size` ids; see `PretrainConfig.subnet_schedule`."""
    if config.est.is_dense:
        tensor = config.parallel.tensor_model_parallel_size
        padded = config.model.padded_vocab_size(vocab_size, tensor)
        return NoSubnets(flops_per_token(config.model, padded_vocab_size=padded))
    schedule = config.subnet_schedule(parallel.world_size, vocab_size=vocab_size)
    return EstSubnets(schedule, parallel)
