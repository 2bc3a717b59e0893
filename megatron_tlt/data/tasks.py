"""Task data sets: prompts with labels for RL, responses for fine-tuning, text for pretraining.

Rows are plain dictionaries for jsonl: {"prompt", "label", "data_source", "reward"} and, where a worked
solution exists, "response"; pretraining rows are {"text"}. Problems of the evaluation split never occur in
the others.
"""

import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import tokenizers

from megatron_tlt.data.countdown import (
    ALPHABET,
    CountdownConfig,
    Problem,
    draw_problem,
    moves,
    write_trace,
)
from megatron_tlt.data.prompts import read_rows
from megatron_tlt.data.reasoning import reasoning_items
from megatron_tlt.files import write_text

Row = dict[str, object]
_EVAL_SHARE = 10  # one problem in ten is kept for evaluation


def is_held_out(problem: Problem) -> bool:
    """Whether the problem, in any order of its numbers, belongs to the evaluation split."""
    return zlib.crc32(repr(problem.key).encode()) % _EVAL_SHARE == 0


def countdown_rows(config: CountdownConfig, *, seed: int, held_out: bool) -> Iterator[Row]:
    """Endless countdown problems with a search trace as response, from one of the two splits."""
    rng = random.Random(seed)
    while True:
        problem = draw_problem(rng, config)
        if is_held_out(problem) != held_out:
            continue
        trace = write_trace(problem, rng, config)
        if trace is not None:
            yield {
                "prompt": problem.prompt,
                "response": trace,
                "label": problem.label,
                "data_source": f"countdown{len(problem.numbers)}",
                "reward": "countdown",
            }


def countdown_walks(config: CountdownConfig, *, seed: int, lines: int = 12) -> Iterator[Row]:
    """Endless pretraining text in countdown's alphabet: random moves from random numbers, without a target.

    Teaches arithmetic and book-keeping, not search; `lines` moves a document.
    """
    rng = random.Random(seed)
    while True:
        text: list[str] = []
        while len(text) < lines:
            left = tuple(rng.randint(1, config.max_number) for _ in range(rng.choice((2, 3, 4))))
            text.append(" ".join(map(str, left)))
            while len(left) > 1 and (choices := moves(left, max_value=config.max_value)):
                move = rng.choice(choices)
                left = move.left
                rest = f"|{' '.join(map(str, left))}" if len(left) > 1 else ""
                text.append(move.text + rest)
        yield {"text": "\n".join(text)}


def gsm8k_rows(path: Path) -> Iterator[Row]:
    """Rows of GSM8K's own jsonl files ({"question", "answer"}); the label is the number after "####"."""
    for place, row in read_rows(path):
        question, answer = row.get("question"), row.get("answer")
        found = re.search(r"####\s*(-?[\d,.]+)\s*$", answer) if isinstance(answer, str) else None
        if not isinstance(question, str) or found is None:
            raise ValueError(f"{place}: no GSM8K row with question and '#### number'")
        yield {
            "prompt": f"{question}\n",
            "response": re.sub(r"<<.*?>>", "", answer),  # calculator annotations
            "label": found[1].replace(",", ""),
            "data_source": "openai/gsm8k",
            "reward": "gsm8k",
        }


def reasoning_rows(
    name: str, *, size: int, seed: int, settings: dict[str, object] | None = None
) -> Iterator[Row]:
    """Rows of a reasoning-gym data set (chain_sum, ...): scored 1.0 or nothing, see data/reasoning.py."""
    for item in reasoning_items(name, size=size, seed=seed, settings=settings or {}):
        yield {
            "prompt": f"{item.question}\n",
            "response": item.answer,
            "label": item.answer,
            "data_source": f"reasoning_gym/{name}",
            "reward": "reasoning_gym",
            "metadata": item.metadata,
        }


def write_rows(path: Path, rows: Iterable[Row], *, size: int | None = None) -> int:
    """The first `size` rows (all by default) as a jsonl file, published by rename; returns their number."""
    lines = [json.dumps(row, ensure_ascii=False) for row in islice(rows, size)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def write_number_tokenizer(path: Path, *, max_value: int) -> int:
    """A `tokenizer.json` for countdown in which every number up to `max_value` is one token; returns the
    number of ids.

    Arithmetic is then a table over tokens, which a model of some million parameters learns in minutes. Text
    outside countdown's alphabet becomes <unk>.
    """
    signs = [sign for sign in ALPHABET if not sign.isdigit()]
    names = ["<|endoftext|>", "<unk>", *signs, *(str(number) for number in range(max_value + 1))]
    model = tokenizers.models.WordLevel(
        {name: number for number, name in enumerate(names)}, unk_token="<unk>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"\d+|\D"), behavior="isolated"
    )
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<|endoftext|>", "<unk>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, tokenizer.to_str(pretty=True))
    return len(names)
