"""What speculation would bring on 8 to 4096 ranks, from lengths, acceptance and step costs measured on two.

`python -m tools.bench.cluster_replay --model HF --drafter DRAFTER --prompts tokens.jsonl`: two
processes, one core each, generate the same responses under every strategy, with two seeds in turn,
`--rounds` times. The costs of a step come from the first seed alone; the replay of the second
seed's responses on two simulated ranks is compared with what its rollouts took, a median. Larger
clusters get their prompts by drawing groups of both seeds again, as many a rank, and bandits that
have seen two ranks' rollouts. Baseline is plain decoding with a static split on as many ranks.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from megatron_tlt.draft.export import draft_tensors, import_drafter, read_drafter_config
from megatron_tlt.files import write_json
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.rollout.costs import CostTable
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.replay import replay
from megatron_tlt.rollout.trace import TraceResponse, trace_of
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, StrategyPolicy
from megatron_tlt.types import OFF, Prompt, SamplingParams, Strategy
from tools.bench.common import RESULTS, command_line, write_result
from tools.native_engine import config_of, engine_of, save_drafter
from tools.ranks import Ranks

_NGRAM = [Strategy(drafter="ngram", num_steps=n, num_draft_tokens=n + 1) for n in (3, 7)]
_TRAINED = [
    Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4),
    Strategy(drafter="eagle", num_steps=6, num_draft_tokens=7),
    Strategy(drafter="hybrid", num_steps=4, topk=3, num_draft_tokens=9),
]
STRATEGIES = [OFF, *_NGRAM, *_TRAINED]
_RANKS, _SEEDS = 2, (0, 1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a random model, to see that it runs")
    parser.add_argument("--model", type=Path, help="Hugging Face folder of the policy")
    parser.add_argument("--drafter", type=Path, help="folder of its drafter")
    parser.add_argument("--prompts", type=Path, help='JSON lines with "tokens"')
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which medians count")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--groups-a-rank", type=int, default=2)
    parser.add_argument("--rest", type=float, default=0.0,
                        help="seconds a response that a step takes beside the rollout, per rank")  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.toy:
        args.num_prompts, args.group, args.max_tokens, args.sizes = 4, 2, 24, [2, 4]
        args.rounds = 1
    elif None in (args.model, args.drafter, args.prompts):
        parser.error("give --model, --drafter and --prompts, or --toy")
    return args


def random_model(folder: Path) -> tuple[Path, Path, Path]:
    """Model, drafter and prompts of a toy."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    save_drafter(Drafter(DrafterConfig.for_target(config_of(folder / "model"))), folder / "drafter")
    lines = [json.dumps({"tokens": [1 + i, 2 + i]}) for i in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "model", folder / "drafter", folder / "prompts.jsonl"


def record(settings: dict) -> int:
    """One of two processes: every strategy and both seeds on its half of the prompts; rank 0 writes all."""
    torch.set_num_threads(1)
    parallel = init_parallel(ParallelConfig(), seed=1)
    model, drafter = Path(settings["model"]), Path(settings["drafter"])
    prompts = [
        Prompt(prompt_id=i, tokens=tuple(tokens)) for i, tokens in enumerate(settings["prompts"])
    ]
    longest = max(len(p.tokens) for p in prompts) + settings["max_tokens"]
    sizes = NativeEngineConfig(max_model_len=longest, max_batch=128)
    engine = engine_of(model, sizes, drafter=read_drafter_config(drafter))
    engine.update_weights("draft", draft_tensors(import_drafter(drafter)), version=1)
    plain = engine_of(model, sizes)
    mine = prompts[parallel.rank :: parallel.world_size]
    found: dict[tuple[int, Strategy], list[list[dict]]] = {}
    for turn in range(settings["rounds"] + 1):  # the first one warms up
        for strategy in STRATEGIES:
            for seed in _SEEDS:
                one = _measure(engine if strategy in _TRAINED else plain, strategy, mine, settings, seed)
                everyone: list = [None] * parallel.world_size
                dist.all_gather_object(everyone, one)
                if turn:
                    found.setdefault((seed, strategy), []).append(everyone)
    if parallel.rank == 0:
        write_json(Path(settings["out"]), [_as_json(*key, turns) for key, turns in found.items()])
    return 0


def _measure(
    engine: NativeEngine, strategy: Strategy, prompts: list[Prompt], settings: dict, seed: int
) -> dict:
    params = SamplingParams(
        n=settings["group"], max_tokens=settings["max_tokens"], seed=seed + 1,
        stop_token_ids=tuple(settings["ends"]),
    )  # fmt: skip
    engine.policy = FixedPolicy(strategy=strategy)
    engine.forget_ngrams()
    before = engine.stats().steps
    dist.barrier()
    began = time.perf_counter()
    rollouts = engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    stats = engine.stats()
    return {"seconds": seconds, "rollouts": rollouts, "records": stats.recent[before - stats.steps :]}


def _as_json(seed: int, strategy: Strategy, turns: list[list[dict]]) -> dict:
    """Plain values; the responses become a trace of one strategy, the median turn's time is the time."""
    rollouts = sorted(
        (r for one in turns[0] for r in one["rollouts"]), key=lambda r: (r.prompt_id, r.sample_index)
    )
    seconds = statistics.median(max(one["seconds"] for one in everyone) for everyone in turns)
    records = [record for everyone in turns for one in everyone for record in one["records"]]
    trace = trace_of({strategy: rollouts})
    return {
        "seed": seed, "strategy": str(strategy), "seconds": seconds,
        "trace": [
            [r.prompt_id, r.sample_index, r.prompt_tokens, r.tokens, r.accepts[str(strategy)]] for r in trace
        ],
        "costs": CostTable.of_records(records).to_json(),
    }  # fmt: skip


def joined(recorded: list[dict], seed: int) -> tuple[list[TraceResponse], CostTable]:
    """The trace and the costs of one seed over all strategies. Raises ValueError where tokens differ."""
    trace: list[TraceResponse] = []
    costs = CostTable()
    for run in (r for r in recorded if r["seed"] == seed):
        table = CostTable.from_json(run["costs"])
        costs.steps |= table.steps
        costs.prefill_token = costs.prefill_token or table.prefill_token
        for place, (prompt_id, sample, prompt, tokens, accepts) in enumerate(run["trace"]):
            if len(trace) <= place:
                trace.append(
                    TraceResponse(
                        prompt_id=prompt_id, sample_index=sample, prompt_tokens=prompt, tokens=tokens,
                        accepts={},
                    )
                )  # fmt: skip
            if trace[place].tokens != tokens:
                raise ValueError(f"prompt {prompt_id}, {sample}: another length under {run['strategy']}")
            accepts_of = dict(trace[place].accepts) | {run["strategy"]: tuple(accepts)}
            trace[place] = replace(trace[place], accepts=accepts_of)
    return trace, costs


def drawn(trace: Sequence[TraceResponse], groups: int, *, seed: int) -> list[TraceResponse]:
    """`groups` groups of the trace, drawn with replacement and numbered anew."""
    members: dict[int, list[TraceResponse]] = {}
    for response in trace:
        members.setdefault(response.prompt_id, []).append(response)
    chosen = random.Random(seed).choices(list(members.values()), k=groups)
    return [replace(r, prompt_id=number) for number, group in enumerate(chosen) for r in group]


def policies(
    trace: list[TraceResponse], costs: CostTable
) -> dict[str, Callable[[], StrategyPolicy]]:
    """Plain decoding, and bandits that go on from what they have learnt on two ranks, as in a run."""
    makers: dict[str, Callable[[], StrategyPolicy]] = {"off": FixedPolicy}
    for name, arms in (("ngram", [OFF, *_NGRAM]), ("tlt", STRATEGIES)):
        taught = BanditTuner(arms)
        replay(trace, lambda b=taught: b, costs, max_batch=128, ranks=_RANKS)
        makers[name] = lambda arms=arms, state=taught.state_dict(): _taught(arms, state)
    return makers


def _taught(arms: list[Strategy], state: dict) -> BanditTuner:
    tuner = BanditTuner(arms)
    tuner.load_state_dict(state)
    return tuner


def validate(recorded: list[dict]) -> list[dict]:
    """Two ranks, each strategy: seed 1's rollouts as measured, and replayed with seed 0's costs."""
    (_, costs), (trace, _) = joined(recorded, 0), joined(recorded, 1)
    rows = []
    for strategy in STRATEGIES:
        measured = next(r for r in recorded if r["seed"] == 1 and r["strategy"] == str(strategy))
        result = replay(
            trace, lambda s=strategy: FixedPolicy(strategy=s), costs, max_batch=128, ranks=_RANKS
        )
        seconds = measured["seconds"]
        rows.append(
            {"kind": "validation", "ranks": _RANKS, "policy": str(strategy), "measured_s": seconds,
             "predicted_s": result.seconds, "error": result.seconds / seconds - 1}
        )  # fmt: skip
    return rows


def predict(trace: list[TraceResponse], costs: CostTable, args: argparse.Namespace) -> list[dict]:
    rows, makers = [], policies(trace, costs)
    for ranks in args.sizes:
        cluster, base = drawn(trace, ranks * args.groups_a_rank, seed=ranks), None
        rest = args.rest * args.groups_a_rank * args.group
        for sharing in ("static", "queue"):
            for name, make in makers.items():
                result = replay(cluster, make, costs, max_batch=128, ranks=ranks, sharing=sharing)
                base = base or result.seconds
                rows.append(
                    {"kind": "cluster", "ranks": ranks, "sharing": sharing, "policy": name,
                     "seconds": result.seconds, "rollout_speedup": base / result.seconds,
                     "step_speedup": (base + rest) / (result.seconds + rest), "bubble": result.bubble}
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def plot(rows: list[dict], path: Path) -> None:
    # Half a second to import, and needed here only.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    found = [row for row in rows if row["kind"] == "cluster"]
    for name in dict.fromkeys(row["policy"] for row in found):
        for sharing, style in (("static", "-"), ("queue", "--")):
            line = [r for r in found if r["policy"] == name and r["sharing"] == sharing]
            points = [(r["ranks"], r["rollout_speedup"]) for r in line]
            axes.plot(*zip(*points, strict=True), style, marker="o", label=f"{name}, {sharing}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel("rollout, times plain decoding\nwith a static split")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.toy:
            args.model, args.drafter, args.prompts = random_model(folder)
        lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.num_prompts]
        eos = config_of(args.model).get("eos_token_id")
        settings = {
            "model": str(args.model), "drafter": str(args.drafter), "group": args.group,
            "rounds": args.rounds,
            "prompts": [json.loads(line)["tokens"] for line in lines], "max_tokens": args.max_tokens,
            "ends": [] if eos is None else [eos], "out": str(folder / "found.json"),
        }  # fmt: skip
        codes = Ranks(record, (settings,), world_size=_RANKS, log=folder / "log").wait(3600.0)
        if codes != [0] * _RANKS:
            raise RuntimeError(f"exit codes {codes}: {(folder / 'log').read_text()[-3000:]}")
        recorded = json.loads((folder / "found.json").read_text())
    rows = validate(recorded)
    (first, costs), (second, _) = joined(recorded, 0), joined(recorded, 1)
    more = 1 + max(r.prompt_id for r in first)
    trace = first + [replace(r, prompt_id=r.prompt_id + more) for r in second]
    rows += predict(trace, costs, args)
    summary = {
        "validation_error": max(abs(r["error"]) for r in rows if r["kind"] == "validation"),
        "rest_s_a_response": args.rest,
    }
    for row in (r for r in rows if r["kind"] == "cluster" and r["policy"] != "off"):
        summary[f"{row['policy']}_{row['sharing']}_{row['ranks']}"] = row["rollout_speedup"]
    print(json.dumps(summary, indent=1))
    command = command_line("tools.bench.cluster_replay")
    path = write_result("cluster_replay", command, rows, summary, folder=args.output)
    plot(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
