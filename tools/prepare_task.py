"""Write prompts with labels for RL (and responses for fine-tuning) of GSM8K or a reasoning-gym data set.

    python tools/prepare_task.py gsm8k --input gsm8k/train.jsonl gsm8k/test.jsonl --output data/gsm8k
    python tools/prepare_task.py reasoning_gym --name chain_sum --output data/chain_sum

gsm8k writes one file of rows for each input, reasoning_gym train.jsonl and eval.jsonl. For countdown see
tools/prepare_countdown.py.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from megatron_tlt.data.tasks import Row, gsm8k_rows, reasoning_rows, write_rows


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    gsm8k = tasks.add_parser("gsm8k", help="grade-school mathematics from its own files")
    gsm8k.add_argument("--input", nargs="+", required=True, help="train.jsonl, test.jsonl")
    gym = tasks.add_parser("reasoning_gym", help="a data set of reasoning-gym")
    gym.add_argument("--name", required=True, help="chain_sum, gcd, base_conversion, ...")
    gym.add_argument("--settings", default="{}", help="JSON of the data set's own settings")
    gym.add_argument("--num-train", type=int, default=4096, help="prompts for RL")
    gym.add_argument("--num-eval", type=int, default=256, help="prompts of another seed")
    gym.add_argument("--seed", type=int, default=0)
    for task in (gsm8k, gym):
        task.add_argument("--output", required=True, help="folder")
    return parser.parse_args(argv)


def write(path: Path, rows: Iterable[Row]) -> None:
    print(f"{write_rows(path, tqdm(rows, desc=path.name, unit=' rows'))} rows in {path}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    folder = Path(args.output)
    if args.task == "gsm8k":
        for name in args.input:
            write(folder / Path(name).name, gsm8k_rows(Path(name)))
    else:
        settings = json.loads(args.settings)
        sizes = (("train", args.num_train), ("eval", args.num_eval))
        for number, (name, count) in enumerate(sizes):
            seed = 2 * args.seed + number
            rows = reasoning_rows(args.name, size=count, seed=seed, settings=settings)
            write(folder / f"{name}.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
