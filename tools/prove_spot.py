"""Prove that training in the tail of rollouts can neither hang nor lose anything: a campaign of random tails.

`python -m tools.prove_spot`: real engines and drafters of a tiny model on 1 to 4 gloo ranks. Ranks stall at
random, so that they finish in any order, all at once, or one much later than the rest. After each tail every
response must be there once, with the tokens that one engine alone draws, and all replicas must be equal to
the last bit. In the rest of the tails a rank is killed at a random moment: the others must end with an error
within seconds, and the same tail again, without the kill, must be whole.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from megatron_tlt.draft.spot import SpotMachine, SpotState
from megatron_tlt.draft.trainer import DrafterTrainerConfig
from megatron_tlt.draft.trigger import TriggerConfig
from megatron_tlt.files import write_json
from megatron_tlt.parallel import Parallel, ParallelConfig, init_parallel, world_store
from megatron_tlt.rl.config import DraftingConfig
from megatron_tlt.rl.drafting import SpotDrafting, build_drafter
from megatron_tlt.rl.schedule import FeedMaker, gather_everywhere, generate_from, name_of_run
from megatron_tlt.rl.timeline import Timeline
from megatron_tlt.rollout.checksum import weights_checksum
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.tuner import BanditTuner
from megatron_tlt.types import OFF, Prompt, SamplingParams, Strategy
from tools.ranks import Ranks

import torch
import torch.distributed as dist

TARGET = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=61, hidden_size=32,
    intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=True,
    rope_theta=10000.0,
)  # fmt: skip
_ARMS = [OFF, Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4)]
_MOMENTS = ("generating", "finished", "training", "publishing")
# Longest wait for the others: nobody dies, or somebody does.
_PATIENCE_S, _PATIENCE_AT_DEATH_S = 60.0, 8.0


def fill_randomly(engine: NativeEngine) -> None:
    """Random weights, alike on all ranks."""
    generator = torch.Generator().manual_seed(1)
    heads = TARGET["num_attention_heads"] // TARGET["num_key_value_heads"]
    size, wide, keys = TARGET["hidden_size"], TARGET["intermediate_size"], TARGET["hidden_size"] // heads
    shapes = {"model.embed_tokens.weight": (TARGET["vocab_size"], size), "model.norm.weight": (size,)}
    for layer in range(TARGET["num_hidden_layers"]):
        own = {
            "self_attn.q_proj": (size, size), "self_attn.k_proj": (keys, size),
            "self_attn.v_proj": (keys, size), "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (wide, size), "mlp.up_proj": (wide, size), "mlp.down_proj": (size, wide),
            "input_layernorm": (size,), "post_attention_layernorm": (size,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    weights = [(n, 0.3 * torch.randn(s, generator=generator)) for n, s in shapes.items()]
    engine.update_weights("target", weights, version=0)


class Tails:
    """One rank's engine and drafter, and the tails that it goes through."""

    def __init__(self, parallel: Parallel, seed: int, kill: tuple[int, str] | None) -> None:
        rng = random.Random(seed)  # alike on all ranks
        self.parallel, self.rng, self.kill = parallel, rng, kill
        config = DraftingConfig(
            trainer=DrafterTrainerConfig(lr=1e-2), trigger=TriggerConfig(), micro_rows=rng.choice((16, 64)),
            buffer_rows=rng.choice((64, 512)), min_updates=rng.choice((0, 0, 1)),
        )  # fmt: skip
        drafter = build_drafter(config, TARGET, seed=1)
        self.engine = NativeEngine(
            TARGET, NativeEngineConfig(max_model_len=64, max_batch=8), policy=BanditTuner(_ARMS),
            drafter=drafter.config,
        )  # fmt: skip
        fill_randomly(self.engine)
        machine = SpotMachine(
            store=world_store(), key=f"spot/{name_of_run()}", world_size=parallel.world_size,
            threshold=rng.randint(1, max(1, parallel.world_size - 1)),
            timeout_s=_PATIENCE_S if kill is None else _PATIENCE_AT_DEATH_S,
        )  # fmt: skip
        self.drafting = SpotDrafting(
            config, drafter, self.engine, machine=machine, timeline=Timeline(rank=parallel.rank),
            trains=True, rank=parallel.rank, seed=seed,
        )  # fmt: skip
        self.feeds = FeedMaker(parallel, world_store() if rng.random() < 0.5 else None)
        self.drafting.publish()
        self.alone = NativeEngine(TARGET, NativeEngineConfig(max_model_len=64, max_batch=8))
        fill_randomly(self.alone)

    def die_at(self, moment: str) -> None:
        if self.kill == (self.parallel.rank, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, step: int) -> dict:
        """One tail: what was found. Raises AssertionError where something is wrong."""
        rng = self.rng
        params = SamplingParams(n=2, max_tokens=rng.choice((1, 4, 16, 40)), seed=step)
        prompts = [Prompt(prompt_id=i, tokens=(1 + i, 2)) for i in range(rng.choice((1, 3, 8)))]
        kind = rng.choice(("none", "one", "all"))
        stalls = [rng.choice((0.0, 0.01, 0.15)) for _ in range(self.parallel.world_size)]
        stall = stalls[self.parallel.rank] if kind == "all" else 0.2 * (kind == "one" and self._is_last(rng))
        began = time.perf_counter()
        self.drafting.begin(step)
        mine = []
        for rollout in generate_from(self.engine, self.feeds(prompts), params, step=step, slots=4):
            mine.append(rollout)
            self.drafting.collect()
            self.die_at("generating")
        time.sleep(stall)
        self.die_at("finished")
        if self.kill == (self.parallel.rank, "training"):
            self._die_while_training()
        self.drafting.fill_tail()
        assert self.drafting.machine.state == SpotState.READY
        self.die_at("publishing")
        rollouts = gather_everywhere(mine, self.parallel)
        metrics = self.drafting.publish()
        self._check(rollouts, prompts, params, step)
        return {
            "seconds": time.perf_counter() - began, "updates": metrics["draft/num_updates"], "stall": kind,
            "preempt_over_update": metrics.get("draft/preempt_over_update", 0.0),
        }  # fmt: skip

    def _is_last(self, rng: random.Random) -> bool:
        return rng.randrange(self.parallel.world_size) == self.parallel.rank

    def _die_while_training(self) -> None:
        step = self.drafting.trainer.step

        def last_step(batch: object) -> None:
            step(batch)
            os.kill(os.getpid(), signal.SIGKILL)

        self.drafting.trainer.step = last_step

    def _check(
        self, rollouts: list, prompts: list[Prompt], params: SamplingParams, step: int
    ) -> None:
        found = {(r.prompt_id, r.sample_index): r.tokens for r in rollouts}
        assert len(found) == len(rollouts) == len(prompts) * params.n, "a response is missing or came twice"
        wanted = self.alone.generate(prompts, params, step=step)
        assert found == {(r.prompt_id, r.sample_index): r.tokens for r in wanted}, "other tokens"
        replicas: list = [None] * self.parallel.world_size
        state = [(str(i), tensor) for i, tensor in enumerate(self.drafting.trainer.tensors())]
        dist.all_gather_object(replicas, weights_checksum(state))
        assert len(set(replicas)) == 1, f"replicas differ: {replicas}"


def run_tails(seed: int, count: int, kill: tuple[int, str] | None = None) -> list[dict]:
    """`count` tails one after the other on this rank; with `kill` = (rank, moment) it dies in the first."""
    torch.set_num_threads(1)
    tails = Tails(init_parallel(ParallelConfig(), seed=1), seed, kill)
    return [tails.run(step) for step in range(1, count + 1)]


def rank_main(seed: int, count: int, kill: tuple[int, str] | None, out: str) -> int:
    """A process of its own; rank 0 writes what was found."""
    found = run_tails(seed, count, kill)
    if dist.get_rank() == 0:
        write_json(Path(out), found)
    return 0


def start(
    folder: Path, seed: int, *, world_size: int, count: int, kill: tuple[int, str] | None
) -> list[int] | None:
    """Exit codes of the ranks; None where they hung."""
    out = folder / f"{seed}{'-killed' * (kill is not None)}.json"
    ranks = Ranks(
        rank_main, (seed, count, kill, str(out)), world_size=world_size, log=folder / f"{seed}.log"
    )
    return ranks.wait(120.0)


def killed_tail(folder: Path, seed: int) -> str:
    """What is wrong with a tail in which a rank dies, and with the same one again; "" where all is right."""
    rng = random.Random(seed)
    world_size = rng.randint(2, 3)
    kill = (rng.randrange(world_size), rng.choice(_MOMENTS))
    codes = start(folder, seed, world_size=world_size, count=1, kill=kill)
    if codes is None:
        return f"seed {seed}: hang after {kill}"
    died = [code for rank, code in enumerate(codes) if rank == kill[0]]
    others = [code for rank, code in enumerate(codes) if rank != kill[0]]
    whole = codes == [0] * world_size  # it never came to that moment: nothing was generated or trained there
    if not whole and (died != [-signal.SIGKILL] or any(code <= 0 for code in others)):
        return f"seed {seed}: {kill} left exit codes {codes}"
    codes = start(folder, seed, world_size=world_size, count=1, kill=None)
    return "" if codes == [0] * world_size else f"seed {seed}: again, exit codes {codes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tails", type=int, default=170, help="tails in which nobody dies")
    parser.add_argument("--killed", type=int, default=30, help="tails in which a rank is killed")
    parser.add_argument("--per-run", type=int, default=10, help="tails of one set of processes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wrong, seen, found = [], Counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(-(-args.tails // args.per_run)):
            seed, world_size = args.seed + number, 1 + number % 4
            count = min(args.per_run, args.tails - number * args.per_run)
            codes = start(Path(scratch), seed, world_size=world_size, count=count, kill=None)
            if codes != [0] * world_size:
                log = (Path(scratch) / f"{seed}.log").read_text()[-2000:]
                wrong.append(f"seed {seed}, {world_size} ranks: exit codes {codes}\n{log}")
            else:
                found += json.loads((Path(scratch) / f"{seed}.json").read_text())
            seen[f"{world_size} ranks"] += count
        for number in range(args.killed):
            problem = killed_tail(Path(scratch), args.seed + 10_000 + number)
            wrong += [problem] * bool(problem)
            seen["killed"] += 1
    for problem in wrong:
        print(problem)
    updates = sum(tail["updates"] for tail in found)
    late = max((tail["preempt_over_update"] for tail in found), default=0.0)
    print(
        f"{sum(seen.values())} tails {dict(seen)}: {len(wrong)} wrong; {updates} updates of drafters, the "
        f"longest preemption took {late:.2f} of its micro-update"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
