"""RL on SGLang as tasks for gloo workers."""

import os
import signal
from pathlib import Path

import torch

from megatron_tlt.rl.loop import train
from megatron_tlt.rl.setup import RlRun
from megatron_tlt.rollout.checksum import weights_checksum
from tests.dist.rl_tasks import ONE, TP2, read_metrics, start, weights_of

STEPS = 3


def train_on_one_engine(root: Path) -> dict:
    """As `train_and_compare`, but both ranks cut the model and share an engine over two processes, and the
    drafter is an EAGLE-3."""
    sections = dict(
        RolloutConfig={"engine": "sglang", "check_weight_update": True, "weight_transport": "group"},
        RlTrainingConfig={"train_iters": 2},
        ModelConfig={"preset": "tiny-llama", "num_layers": 8},  # EAGLE-3 wants layers 2, 4 and 5
        DraftingConfig={"min_updates": 1, "layout": "eagle3"},
        speculation="tlt",
        AlgorithmConfig={"max_logprob_diff": 1e-3},
    )
    run = start(Path(root), TP2, **sections)
    state = train(run)
    embedding, head = run.engine.tables()
    weights = weights_of(run)
    return {
        "iteration": state.iteration,
        "has_engine": run.engine.engine is not None,
        "tables": [
            torch.equal(embedding, weights["model.embed_tokens.weight"]),
            torch.equal(head, weights["lm_head.weight"]),
        ],
        "drafter": weights_checksum(run.drafting.drafter.state_dict().items()),
        "metrics": read_metrics(root),
        "probes": read_metrics(root, kind="probe"),
    }


def train_and_compare(root: Path, dies_in: int | None) -> dict:
    """`STEPS` steps; after each, both ends' checksums. Rank 0's engine dies in a rollout."""
    sections = dict(
        RolloutConfig={"engine": "sglang", "check_weight_update": True, "weight_transport": "tensor"},
        RlTrainingConfig={"train_iters": STEPS},
        DraftingConfig={"min_updates": 1},
        speculation="tlt",
        AlgorithmConfig={"max_logprob_diff": 1e-3},
    )
    run = start(Path(root), ONE, **sections)
    checksums: list[tuple[str, str]] = []
    publish = run.drafting.publish

    def publish_and_compare() -> dict:
        """The drafter's publication follows the policy's; the first one starts the engine."""
        metrics = publish()
        checksums.append((weights_checksum(weights_of(run).items()), run.engine.engine_checksum()))
        return metrics

    run.drafting.publish = publish_and_compare
    if dies_in is not None and run.parallel.rank == 0:
        _kill_engine_in(run, dies_in)
    state = train(run)
    return {
        "checksums": checksums,
        "iteration": state.iteration,
        "restarts": run.engine.restarts,
        "draft_version": run.drafting.version,
        "metrics": read_metrics(root),
        "probes": read_metrics(root, kind="probe"),
    }


def _kill_engine_in(run: RlRun, step: int) -> None:
    submit, wanted, killed = run.engine.submit, step, []

    def submit_and_kill(prompts, params, *, step: int) -> None:
        submit(prompts, params, step=step)
        if step == wanted and not killed:
            killed.extend(run.engine.check_health()["pids"])
            os.kill(killed[0], signal.SIGKILL)

    run.engine.submit = submit_and_kill
