"""GRPO steps with speculation off, ngram, frozen and tlt: the same policy, prompts, seeds, ranks and cores.

`python -m tools.bench.tlt --checkpoint SFT --prompts rl.jsonl`: each side is one run that goes on from its
own checkpoint by turns, so that the sides alternate; the first step of a turn is not counted. Since no
speculation changes a token, step n of every side has the same work, and steps are compared in pairs. Frozen
and tlt start from one drafter, warmed up on the policy's own answers. At the end both drafters draft for the
final policy, on the same prompts, in chains of six.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.bridge.convert import megatron_to_hf
from megatron_tlt.bridge.finetune import find_source
from megatron_tlt.data.prompts import PromptDataConfig, load_prompts
from megatron_tlt.data.tokenizer import build_tokenizer
from megatron_tlt.draft.export import draft_tensors, import_drafter
from megatron_tlt.draft.state import DRAFTER_FILE
from megatron_tlt.files import publish_folder, write_json
from megatron_tlt.models.drafter import Drafter
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.rollout.acceptance import accept_length, rates
from megatron_tlt.rollout.native.engine import NativeEngineConfig
from megatron_tlt.rollout.tuner import FixedPolicy
from megatron_tlt.train.checkpoint import CheckpointConfig, iteration_folder
from megatron_tlt.types import Prompt, SamplingParams, Strategy
from tools.bench.common import RESULTS, command_line, write_result
from tools.bench.rl import prepare
from tools.native_engine import config_of, engine_of

import torch
from safetensors.torch import load_file, save_file

_PHASES = {
    "step_s": "perf/step_time", "rollout_s": "perf/rollout_time", "reward_s": "perf/reward_time",
    "log_probs_s": "perf/log_probs_time", "update_s": "perf/actor_train_time",
    "publish_s": "perf/update_weights_time",
}  # fmt: skip
_OTHERS = (
    "rollout/raw_reward", "rollout/response_len/mean", "rollout/response_len/max", "ledger/bubble_frac",
    "train/train_rollout_logprob_abs_diff_max", "rollout/spec_accept_length", "draft/accept_length_trained",
    "draft/accept_length_ngram", "draft/sim_accept_length", "draft/loss_first", "draft/loss_last",
    "draft/num_updates", "draft/overhead_s", "draft/preempt_s", "draft/preempt_over_update",
)  # fmt: skip
_CHAIN = Strategy(drafter="eagle", num_steps=6, num_draft_tokens=7)


def common_options(description: str) -> argparse.ArgumentParser:
    """Options of every benchmark of GRPO steps with speculation."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--toy", action="store_true", help="smallest sizes, to see that it runs")
    parser.add_argument("--checkpoint", type=Path, help="folder of a fine-tuned policy")
    parser.add_argument("--prompts", type=Path, help="JSON lines of countdown problems")
    parser.add_argument("--drafter", type=Path, help="folder of a warm drafter; default: make one")
    parser.add_argument("--deepen", type=int, default=1, help="see `deepen`")
    parser.add_argument("--work", type=Path, help="folder for runs and logs; default: a temporary one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=640)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup-iterations", type=int, default=600)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="further options of all runs")  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; sizes of a toy where they ask for one."""
    args = parser.parse_args()
    if args.toy:
        args.num_prompts, args.group, args.max_tokens = 2, 2, 24
    elif args.checkpoint is None or args.prompts is None:
        parser.error("give --checkpoint and --prompts (see examples/grpo_countdown_cpu.yaml), or --toy")
    return args


def parse_arguments() -> argparse.Namespace:
    parser = common_options(__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", default=["off", "ngram", "frozen", "tlt"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="steps a turn, the first not counted")
    args = parsed(parser)
    if args.toy:
        args.sides, args.turns, args.steps = ["off", "tlt"], 1, 3
    return args


@dataclass(kw_only=True, slots=True)
class Bench:
    """What all runs share."""

    args: argparse.Namespace
    work: Path
    checkpoint: Path
    prompts: Path
    drafter: Path | None

    def turn(self, side: str, seed: int, *, last_step: int) -> list[dict]:
        """Go on with one side's run up to `last_step`; its new steps, the first not among them."""
        folder = self.work / f"{side}-{seed}"
        logs = folder / "logs" / "metrics.jsonl"
        before = len(logs.read_text().splitlines()) if logs.is_file() else 0
        _run(self.command(side, seed, folder, last_step=last_step))
        records = map(json.loads, logs.read_text().splitlines()[before:])
        steps = [record for record in records if record["kind"] == "train"]
        return [{"side": side, "seed": seed, **_split(record)} for record in steps[1:]]

    def command(self, side: str, seed: int, folder: Path, *, last_step: int) -> list[str]:
        args = self.args
        options = {
            "pretrained_checkpoint": self.checkpoint, "data.prompt_data": f"[{self.prompts}]",
            "rewards.reward": "countdown", "rewards.num_workers": 0,
            "rollout.rollout_batch_size": args.num_prompts, "rollout.n_samples_per_prompt": args.group,
            "rollout.max_response_len": args.max_tokens, "rollout.max_running_requests": 128,
            "algorithm.algorithm": "dr_grpo", "training.train_iters": last_step, "training.seed": seed,
            "optimizer.lr": args.lr, "optimizer.lr_decay_style": "constant",
            "optimizer.lr_decay_iters": 10_000, "optimizer.weight_decay": 0.0,
            "checkpoint.save": folder / "checkpoint", "checkpoint.load": folder / "checkpoint",
            "checkpoint.keep_last": 1, "logging.log_dir": folder / "logs", "speculation": side,
        }  # fmt: skip
        if self.drafter is not None and side in ("frozen", "tlt"):
            options["drafter.path"] = self.drafter
        options |= dict(item.split("=", 1) for item in args.set)
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
            str(args.ranks), "-m", "megatron_tlt.rl", *(f"--{k}={v}" for k, v in options.items()),
        ]  # fmt: skip


def _run(command: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1500:]} {done.stderr[-3000:]}")


def _split(record: dict) -> dict:
    row = {name: record[key] for name, key in _PHASES.items()}
    # Until the last response of all ranks is there: without a drafter a rank waits for it among the rewards.
    row["rollout_s"] += row["reward_s"]
    row |= {key: record[key] for key in _OTHERS if key in record}
    positions = {k: v for k, v in record.items() if k.startswith("draft/accept_position_")}
    return {"step": record["iteration"]} | row | positions


def prompt_tokens(checkpoint: Path, prompts: Path) -> list[tuple[int, ...]]:
    """The prompts as the runs see them."""
    source = find_source(
        CheckpointConfig(), stage="rl", model=None, tokenizer=None, pretrained=str(checkpoint)
    )
    found = load_prompts(PromptDataConfig(prompt_data=[str(prompts)]), build_tokenizer(source.tokenizer))
    return [record.prompt.tokens for record in found.records]


def deepen(source: Path, folder: Path, *, times: int) -> None:
    """The same function from `times` as many layers: copies whose outputs are zero, as LLaMA Pro expands
    models (https://arxiv.org/abs/2401.02415).

    A policy that fits this benchmark's time has few layers, so that one layer of drafter is a large part of
    it; depth gives drafting the proportions that it has on real models. The copies train with the rest.
    """
    tensors, config = load_file(source / "model.safetensors"), config_of(source)
    deeper = {}
    for name, tensor in tensors.items():
        head, _, tail = name.partition(".layers.")
        if not tail:
            deeper[name] = tensor
            continue
        layer, _, rest = tail.partition(".")
        silent = rest.startswith(("self_attn.o_proj", "mlp.down_proj"))
        for copy in range(times):
            value = torch.zeros_like(tensor) if copy and silent else tensor
            deeper[f"{head}.layers.{int(layer) * times + copy}.{rest}"] = value.clone()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(deeper, partial / "model.safetensors", metadata={"format": "pt"})
    write_json(partial / "config.json", config | {"num_hidden_layers": times * config["num_hidden_layers"]})
    publish_folder(partial, folder)


def warm_up(bench: Bench, tokens: list[tuple[int, ...]]) -> Path:
    """A drafter trained on the first policy's answers."""
    hf, folder, args = bench.checkpoint, bench.work / "drafter", bench.args
    if not folder.is_dir():
        file = bench.work / "warmup.jsonl"
        chosen = random.Random(1).sample(tokens, min(len(tokens), 256))
        file.write_text("".join(json.dumps({"tokens": list(t)}) + "\n" for t in chosen))
        _run([
            sys.executable, "-m", "tools.train_drafter", "--model", str(hf), "--prompts", str(file),
            "--output", str(folder), "--n", "4", "--max-tokens", str(args.max_tokens),
            "--iterations", str(args.warmup_iterations),
        ])  # fmt: skip
    return folder


def stored_drafter(checkpoint: Path, like: Drafter) -> Drafter:
    """The drafter of an RL checkpoint, of the shape of another."""
    drafter = Drafter(like.config)
    stored = load_file(checkpoint / DRAFTER_FILE)
    drafter.load_state_dict(
        {k.removeprefix("model."): v for k, v in stored.items() if k.startswith("model.")}
    )
    return drafter


def acceptance(
    hf: Path, drafters: dict[str, Drafter], tokens: list[tuple[int, ...]], *, max_tokens: int, seed: int
) -> dict[str, dict]:
    """Accept length and share kept by position of each drafter, for the policy in `hf`.

    Chains of six on the same 64 responses for all: no drafter changes a token.
    """
    chosen = random.Random(2).sample(tokens, min(len(tokens), 32))
    prompts = [Prompt(prompt_id=i, tokens=t) for i, t in enumerate(chosen)]
    longest, end = max(map(len, chosen)) + max_tokens, config_of(hf)["eos_token_id"]
    params = SamplingParams(
        n=2, max_tokens=max_tokens, seed=seed, stop_token_ids=() if end is None else (end,)
    )
    found = {}
    for name, drafter in drafters.items():
        engine = engine_of(hf, NativeEngineConfig(max_model_len=longest), drafter=drafter.config)
        engine.update_weights("draft", draft_tensors(drafter), version=1)
        engine.policy = FixedPolicy(strategy=_CHAIN)
        engine.generate(prompts, params)
        counts = engine.take_acceptance()
        found[name] = {
            "accept_length": accept_length(counts, ["eagle"]),
            "positions": list(rates(counts, "eagle", "position").values()),
        }
    return found


def final_acceptance(bench: Bench, seed: int, tokens: list[tuple[int, ...]], *, step: int) -> dict:
    """`acceptance` of the frozen and the adapted drafter, for the last policy."""
    checkpoint = iteration_folder(bench.work / f"tlt-{seed}" / "checkpoint", step)
    hf = bench.work / f"final-{seed}"
    if not hf.is_dir():
        megatron_to_hf(checkpoint, hf, init_parallel(ParallelConfig(), seed=1))
    frozen = import_drafter(bench.drafter).float()
    drafters = {"frozen": frozen, "adapted": stored_drafter(checkpoint, frozen)}
    return acceptance(hf, drafters, tokens, max_tokens=bench.args.max_tokens, seed=seed)


def interval(ratios: list[float]) -> list[float]:
    """95 % interval of the median by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return [medians[25], medians[974]]


def summarise(rows: list[dict]) -> dict:
    """Speed against off, in medians; intervals from pairs of the same seed and step."""

    def of(side: str, key: str) -> list[float]:
        return [row[key] for row in rows if row["side"] == side and key in row]

    by = {(row["side"], row["seed"], row["step"]): row for row in rows}
    sides = [side for side in dict.fromkeys(row["side"] for row in rows) if side != "off"]
    summary: dict = {"steps_a_side": len(of("off", "step_s"))}
    for side in sides:
        summary[side] = statistics.median(of("off", "step_s")) / statistics.median(of(side, "step_s"))
        for name, key in (("", "step_s"), ("_rollout", "rollout_s")):
            pairs = [
                (row[key], by[side, seed, step][key])
                for (other, seed, step), row in by.items()
                if other == "off" and (side, seed, step) in by
            ]
            summary[f"{side}{name}_paired"] = statistics.median(a / b for a, b in pairs)
            summary[f"{side}{name}_interval"] = interval([a / b for a, b in pairs])
    if "tlt" in sides:
        rollout = [statistics.median(of(side, "rollout_s")) for side in ("off", "tlt")]
        summary["rollout_only"] = rollout[0] / rollout[1]
        shares = [
            row["draft/overhead_s"] / row["step_s"] for row in rows if "draft/overhead_s" in row
        ]
        summary["spot_overhead"] = statistics.median(shares)
        over = sorted(of("tlt", "draft/preempt_over_update"))
        summary["preempt_p99_over_update"] = over[min(len(over) - 1, int(0.99 * len(over)))] if over else 0.0
        rewards = [statistics.fmean(of(side, "rollout/raw_reward")) for side in ("off", "tlt")]
        summary["reward_off"], summary["reward_tlt"] = rewards
    summary["logprob_diff_max"] = max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows)
    return summary


def measure(bench: Bench) -> tuple[list[dict], dict]:
    args, rows = bench.args, []
    for seed in args.seeds:
        for turn in range(1, args.turns + 1):
            for side in args.sides:
                rows += bench.turn(side, seed, last_step=turn * args.steps)
                print(seed, turn, side, round(rows[-1]["step_s"], 3), flush=True)
    return rows, summarise(rows)


def prepared(args: argparse.Namespace, work: Path) -> tuple[Bench, list[tuple[int, ...]]]:
    """Policy and warm drafter in `work`, and the prompts' tokens."""
    work.mkdir(parents=True, exist_ok=True)
    if args.toy:
        args.trl_micro_batch, args.cores = 0, args.ranks
        made = prepare(work, args)
        args.checkpoint, args.prompts = Path(made["model"]), Path(made["prompts"])
    start = args.checkpoint
    if not args.toy:
        start = work / f"policy-{args.deepen}"
        if not start.is_dir():
            megatron_to_hf(args.checkpoint, work / "hf", init_parallel(ParallelConfig(), seed=1))
            deepen(work / "hf", start, times=args.deepen)
    bench = Bench(
        args=args, work=work, checkpoint=start, prompts=args.prompts, drafter=args.drafter
    )
    tokens = prompt_tokens(bench.checkpoint, bench.prompts)
    if not args.toy and bench.drafter is None:
        bench.drafter = warm_up(bench, tokens)
    return bench, tokens


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        bench, tokens = prepared(args, args.work or Path(scratch))
        rows, summary = measure(bench)
        if bench.drafter is not None and "tlt" in args.sides:
            found = [
                final_acceptance(bench, seed, tokens, step=args.turns * args.steps) for seed in args.seeds
            ]
            for name in ("frozen", "adapted"):
                summary[f"accept_{name}"] = statistics.fmean(f[name]["accept_length"] for f in found)
                summary[f"accept_{name}_by_position"] = [
                    statistics.fmean(x) for x in zip(*(f[name]["positions"] for f in found), strict=True)
                ]
    print(json.dumps(summary, indent=1))
    write_result("tlt", command_line("tools.bench.tlt"), rows, summary, folder=args.output)


if __name__ == "__main__":
    main()
