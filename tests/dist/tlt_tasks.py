"""Speculation with a drafter that trains in the tail, as tasks for gloo workers."""

import random
import time
from pathlib import Path

from megatron_tlt.draft.batch import pack
from megatron_tlt.draft.merge import merge_replicas, snapshot
from megatron_tlt.draft.trainer import DrafterTrainer, DrafterTrainerConfig
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.rl.loop import train
from megatron_tlt.rollout.checksum import weights_checksum
from megatron_tlt.types import FeatureSample
from tests.dist.rl_tasks import read_metrics, start

import torch


def state_of(run) -> dict:
    """What a resume must bring back of the drafter, as plain values and digests."""
    drafting = run.drafting
    return {
        "weights": weights_checksum(drafting.drafter.state_dict().items()),
        "moments": weights_checksum((str(i), t) for i, t in enumerate(drafting.trainer.tensors())),
        "iteration": drafting.trainer.iteration,
        "lessons": drafting.buffer.digest(),
        "version": (drafting.version, drafting.lessons_version, drafting.tried_at),
        "trigger": drafting.trigger.state_dict(),
        "tuner": run.engine.tuner_state(),
    }


def drift_start(run, *, seed: int) -> None:
    """Ranks enter the rollouts at random moments, some of them much later than others."""
    rng = random.Random(f"{seed}:{run.parallel.rank}")
    begin = run.drafting.begin

    def late(step: int) -> None:
        begin(step)
        time.sleep(rng.choice((0.0, 0.0, 0.02, 0.3)))

    run.drafting.begin = late


def run_with_a_late_rank(root: Path, layout: dict, seconds: float) -> list[dict]:
    """Metrics of a run without speculation whose last rank begins each rollout `seconds` late."""
    run = start(root, layout)
    begin = run.drafting.begin

    def late(step: int) -> None:
        begin(step)
        time.sleep(seconds * (run.parallel.rank == torch.distributed.get_world_size() - 1))

    run.drafting.begin = late
    train(run)
    return read_metrics(root)


def run_tlt(root: Path, layout: dict, sections: dict, seed: int | None = None) -> dict:
    """Train to the end; what the drafter is then, and what it was before."""
    run = start(root, layout, **sections)
    before = state_of(run) | {"iteration_of_run": run.state.iteration}
    if seed is not None:
        drift_start(run, seed=seed)
    train(run)
    drafting, engine = run.drafting, run.engine
    assert drafting.drafter.embedding.data_ptr() == engine.model.embedding.data_ptr()
    return {
        "before": before,
        "after": state_of(run),
        "engine": weights_checksum([("fc", drafting.engine.eagle.fc.weight)]),
        "fc": weights_checksum([("fc", drafting.drafter.fc.weight.t().contiguous())]),
        "shares": drafting.drafter.head.untyped_storage().data_ptr()
        == engine.model.head.weight.untyped_storage().data_ptr(),
        "metrics": read_metrics(root),
    }


SIZES = DrafterConfig(
    hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2, head_dim=4,
    vocab_size=11, max_position_embeddings=64,
)  # fmt: skip


def trainer_alike() -> DrafterTrainer:
    """The same on every rank."""
    torch.manual_seed(0)
    drafter, table = Drafter(SIZES), torch.randn(11, 16)
    drafter.share(table, table)
    return DrafterTrainer(drafter, DrafterTrainerConfig(lr=1e-2, lr_warmup_iters=0))


def lessons_of(rank: int, rows: int) -> list[FeatureSample]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 11, (rows,), generator=generator).tolist()
    return [
        FeatureSample(
            prompt_id=rank, sample_index=0, tokens=tuple(tokens), weight_version=0,
            hidden=torch.randn(rows, 16, generator=generator),
        )
    ]  # fmt: skip


def merge_after(updates: list[int], rows: list[int]) -> dict:
    """Each rank makes its own number of updates on its own number of rows; what merging leaves."""
    rank, trainer = init_parallel(ParallelConfig(), seed=1).rank, trainer_alike()
    begun = snapshot(trainer)
    for _ in range(updates[rank]):
        trainer.step(pack(lessons_of(rank, rows[rank])))
    mine, tokens = snapshot(trainer), updates[rank] * rows[rank]
    merge_replicas(trainer, begun, tokens=tokens, start_iteration=0)
    merged = snapshot(trainer)
    trainer.step(pack(lessons_of(9, 8)))  # the optimizer goes on from what was merged
    return {
        "start": begun, "mine": mine, "merged": merged, "tokens": tokens,
        "iteration": trainer.iteration, "bits": weights_checksum([("all", snapshot(trainer))]),
    }  # fmt: skip
