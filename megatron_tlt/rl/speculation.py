"""What `--speculation` chooses: the strategies that the bandit may take, and the drafter of the policy."""

from megatron_tlt.draft.spot import SpotMachine
from megatron_tlt.models.drafter import Drafter
from megatron_tlt.parallel import Parallel, world_store
from megatron_tlt.rl.config import RlConfig
from megatron_tlt.rl.drafting import DraftingEngine, SpotDrafting
from megatron_tlt.rl.schedule import name_of_run
from megatron_tlt.rl.timeline import Timeline
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, StrategyPolicy
from megatron_tlt.types import OFF, Strategy

_NGRAM = [Strategy(drafter="ngram", num_steps=n, num_draft_tokens=n + 1) for n in (3, 7)]
# Chains of the trained drafter, and a tree with n-gram guesses grafted in.
_TRAINED = [
    Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4),
    Strategy(drafter="eagle", num_steps=6, num_draft_tokens=7),
    Strategy(drafter="hybrid", num_steps=4, topk=3, num_draft_tokens=9),
]


def build_tuner(config: RlConfig) -> StrategyPolicy:
    """What chooses a strategy before each decode step."""
    if config.speculation == "off":
        return FixedPolicy()
    return BanditTuner([OFF, *_NGRAM, *(_TRAINED if config.drafts else [])])


def build_drafting(
    config: RlConfig, drafter: Drafter, engine: DraftingEngine, parallel: Parallel, timeline: Timeline
) -> SpotDrafting:
    """The drafter beside `engine`; collective over the world."""
    machine = SpotMachine(
        store=world_store(),
        key=f"spot/{name_of_run()}",
        world_size=parallel.world_size,
        threshold=config.drafter.idle_ranks,
        timeout_s=60 * config.parallel.distributed_timeout_minutes,
    )
    return SpotDrafting(
        config.drafter, drafter, engine, machine=machine, timeline=timeline,
        trains=config.speculation == "tlt", rank=parallel.rank, seed=config.training.seed,
    )  # fmt: skip
