"""Write the countdown task: tokenizer, pretraining text, fine-tuning examples, RL prompts, held-out prompts.

`python tools/prepare_countdown.py --output-dir runs/countdown/data`; problems of eval.jsonl occur in no other
file, whatever the order of their numbers.
"""

import argparse
from itertools import islice
from pathlib import Path

from megatron_tlt.data.countdown import CountdownConfig
from megatron_tlt.data.tasks import (
    countdown_rows,
    countdown_walks,
    write_number_tokenizer,
    write_rows,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--num-walks", type=int, default=4000, help="pretraining documents")
    parser.add_argument("--num-sft", type=int, default=30000, help="problems with a search trace")
    parser.add_argument("--num-rl", type=int, default=4000, help="prompts for RL")
    parser.add_argument("--num-eval", type=int, default=128, help="held-out prompts")
    parser.add_argument("--shares", type=float, nargs=3, default=[0.3, 0.5, 0.2],
                        help="shares of problems with 2, 3 and 4 numbers, for RL")  # fmt: skip
    # Short searches compare with the target more often, which is what a small model learns last.
    parser.add_argument("--sft-shares", type=float, nargs=3, default=[0.6, 0.3, 0.1],
                        help="the same for fine-tuning")  # fmt: skip
    parser.add_argument("--max-number", type=int, default=6)
    parser.add_argument("--max-value", type=int, default=24, help="of targets and results on the way")
    parser.add_argument("--max-trace-chars", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def problems(args: argparse.Namespace, shares: list[float]) -> CountdownConfig:
    return CountdownConfig(
        shares={count: share for count, share in enumerate(shares, 2) if share > 0},
        max_number=args.max_number,
        max_value=args.max_value,
        max_trace_chars=args.max_trace_chars,
    )


def main() -> None:
    args = parse_arguments()
    config, sft = problems(args, args.shares), problems(args, args.sft_shares)
    folder, seed = args.output_dir, args.seed
    ids = write_number_tokenizer(
        folder / "tokenizer" / "tokenizer.json", max_value=config.max_value
    )
    files = {
        "pretrain.jsonl": islice(countdown_walks(config, seed=seed), args.num_walks),
        "sft.jsonl": islice(countdown_rows(sft, seed=seed, held_out=False), args.num_sft),
        "rl.jsonl": islice(countdown_rows(config, seed=seed + 1, held_out=False), args.num_rl),
        "eval.jsonl": islice(countdown_rows(config, seed=seed + 2, held_out=True), args.num_eval),
    }
    for name, rows in files.items():
        count = write_rows(folder / name, rows)
        print(f"{folder / name}: {count} rows", flush=True)
    print(f"{folder / 'tokenizer'}: {ids} ids", flush=True)


if __name__ == "__main__":
    main()
