"""Step time of GRPO, split into generation, rewards and training, against TRL's GRPOTrainer.

`python -m tools.bench.rl --trl-python VENV/bin/python`: the same Llama weights, prompts, reward, group size,
length limit and number of CPU cores; fp32, one update a step, no KL, no speculation. Both run by turns, each
turn a process of its own whose first step is not counted. Without TRL only our rows are written. The random
model ends a response at any token with the same chance, so lengths are long-tailed without any training.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from megatron_tlt.bridge.convert import megatron_to_hf
from megatron_tlt.data.countdown import CountdownConfig
from megatron_tlt.data.tasks import countdown_rows, write_number_tokenizer, write_rows
from megatron_tlt.data.tokenizer import TokenizerConfig, build_tokenizer
from megatron_tlt.models.gpt import ModelConfig, build_chunks, model_identity
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.train.checkpoint import TrainState, save_checkpoint
from tools.bench.common import RESULTS, command_line, write_result

_PHASES = ("step_s", "generate_s", "reward_s", "train_s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="smallest sizes, to see that it runs")
    parser.add_argument("--trl-python", type=Path, help="Python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps a turn, the first not counted")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--trl-micro-batch", type=int, default=16)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--merge", action="append", default=[], metavar="FILE",
                        help="JSON of further summary entries (learning curve, quickstart)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.toy:
        args.rounds, args.steps, args.num_prompts, args.group, args.max_tokens = 1, 2, 2, 2, 24
        args.trl_micro_batch = 4
    return args


def prepare(folder: Path, args: argparse.Namespace) -> dict:
    """Model, tokenizer and prompts on disk, and the settings of both sides."""
    size = dict(num_layers=2, hidden_size=32, ffn_hidden_size=64) if args.toy else {}
    model = ModelConfig(**dict(
        num_layers=4, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4,
        num_query_groups=2, seq_length=1024) | size)  # fmt: skip
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    vocab_size = write_number_tokenizer(tokenizer, max_value=99)
    write_rows(folder / "prompts.jsonl", countdown_rows(CountdownConfig(), seed=0, held_out=False), size=256)
    parallel = init_parallel(ParallelConfig(), seed=1)
    chunks = build_chunks(model, parallel, vocab_size=vocab_size)
    initialize_parameters(chunks, seed=1, vocab_size=vocab_size)
    named = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer.parent)
    )
    state = TrainState(
        model=model_identity(model),
        tokenizer=build_tokenizer(named).identity(),
        config={"vocab_size": vocab_size, "tokenizer": asdict(named)},
    )
    save_checkpoint(folder / "megatron", state, chunks, None, groups=parallel.groups)
    megatron_to_hf(folder / "megatron", folder / "hf", parallel)
    return {
        "folder": str(folder), "model": str(folder / "hf"), "checkpoint": str(folder / "megatron"),
        "tokenizer": str(tokenizer), "prompts": str(folder / "prompts.jsonl"), "lr": 1e-6,
        "num_prompts": args.num_prompts, "group": args.group, "max_tokens": args.max_tokens,
        "steps": args.steps, "trl_micro_batch": args.trl_micro_batch, "threads": args.cores,
        "seed": 0,
    }  # fmt: skip


def run_ours(settings: dict, *, ranks: int, cores: int, speculation: str = "off") -> list[dict]:
    """One turn of `ranks` processes that share `cores` threads."""
    logs = Path(settings["folder"]) / "logs"
    (logs / "metrics.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               str(ranks), "-m", "megatron_tlt.rl"] if ranks > 1 else [
               sys.executable, "-m", "megatron_tlt.rl"]  # fmt: skip
    options = {
        "pretrained_checkpoint": settings["checkpoint"],
        "data.prompt_data": f"[{settings['prompts']}]",
        "rewards.reward": "countdown",
        "rewards.num_workers": 0,
        "rollout.rollout_batch_size": settings["num_prompts"],
        "rollout.n_samples_per_prompt": settings["group"],
        "rollout.max_response_len": settings["max_tokens"],
        "algorithm.kl_loss_coef": 0.0,
        "training.train_iters": settings["steps"],
        "training.seed": settings["seed"],
        # The random model solves nothing, so all advantages are 0: both sides compute them nevertheless.
        "training.skip_zero_advantage": False,
        "optimizer.lr": settings["lr"],
        "optimizer.lr_decay_style": "constant",
        "optimizer.weight_decay": 0.0,
        "logging.log_dir": logs,
        "speculation": speculation,
    }
    command += [f"--{key}={value}" for key, value in options.items()]
    _run(command, threads=cores // ranks)
    lines = (logs / "metrics.jsonl").read_text().splitlines()
    rows = [_split(record) for record in map(json.loads, lines) if record["kind"] == "train"]
    return rows[1:]


def _split(record: dict) -> dict:
    count = record["rollout/response_len/mean"]
    return {
        "step_s": record["perf/step_time"],
        "generate_s": record["perf/rollout_time"],
        "reward_s": record["perf/reward_time"],
        "train_s": record["perf/step_time"] - record["perf/rollout_time"] - record["perf/reward_time"],
        "mean_tokens": count,
        "longest": record["rollout/response_len/max"],
        "logprob_diff": record["train/train_rollout_logprob_abs_diff_max"],
    }


def run_trl(settings: dict, python: Path) -> list[dict]:
    """One turn of TRL; its first step is not counted either."""
    path = Path(settings["folder"]) / "settings.json"
    path.write_text(json.dumps(settings))
    out = _run([str(python), "-m", "tools.bench.trl_twin", str(path)], threads=settings["threads"])
    rows = json.loads(next(x for x in out.splitlines() if x.startswith("RESULT "))[7:])
    samples = settings["num_prompts"] * settings["group"]
    return [row | {"mean_tokens": row.pop("response_tokens") / samples} for row in rows[1:]]


def _run(command: list[str], *, threads: int) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, threads))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-3000:]}")
    return done.stdout


def summarise(name: str, rows: list[dict]) -> dict:
    """Medians over all counted steps of one side."""
    keys = [k for k in (*_PHASES, "mean_tokens", "longest", "logprob_diff") if k in rows[0]]
    medians = {key: statistics.median(row[key] for row in rows) for key in keys}
    spread = {"step_min_s": min(r["step_s"] for r in rows), "step_max_s": max(r["step_s"] for r in rows)}
    return {"name": name, "steps": len(rows)} | medians | spread


def main() -> None:
    args = parse_arguments()
    sides: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        settings = prepare(Path(scratch), args)
        for turn in range(args.rounds):
            settings["seed"] = turn
            for ranks in (1, args.cores) if args.cores > 1 and not args.toy else (1,):
                found = run_ours(settings, ranks=ranks, cores=args.cores)
                sides.setdefault(f"megatron_tlt, {ranks} ranks", []).extend(found)
            if args.trl_python is not None:
                sides.setdefault("trl", []).extend(run_trl(settings, args.trl_python))
            print({name: round(rows[-1]["step_s"], 3) for name, rows in sides.items()}, flush=True)
    rows = [summarise(name, found) for name, found in sides.items()]
    summary = {
        "cores": args.cores,
        "max_logprob_diff": max(row.get("logprob_diff", 0.0) for row in rows),
    }
    trl = next((row for row in rows if row["name"] == "trl"), None)
    if trl is not None:
        ours = [row for row in rows if row is not trl]
        # Per generated token: the two sides draw different samples.
        cost = {r["name"]: r["step_s"] / r["mean_tokens"] for r in rows}
        summary["vs_trl"] = cost["trl"] / min(cost[row["name"]] for row in ours)
        summary["vs_trl_one_process"] = cost["trl"] / cost[ours[0]["name"]]
    for path in args.merge:
        summary |= json.loads(Path(path).read_text())
    for row in rows:
        print(row)
    print(summary)
    write_result("rl", command_line("tools.bench.rl"), rows, summary, folder=args.output)


if __name__ == "__main__":
    main()
