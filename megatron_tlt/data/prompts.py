"""Prompts for RL from jsonl or parquet (verl's layout included), and the cursor that hands each out once.

A row holds a prompt (text, or chat messages), a label for the reward, and optionally a data source, the name
of its reward and further metadata; config keys say where, with dots for nested fields
("reward_model.ground_truth").
"""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.types import Prompt

Render = Callable[[list[dict[str, str]]], str]


@dataclass(kw_only=True, slots=True)
class PromptDataConfig:
    """Where prompts come from and which fields of a row are what."""

    prompt_data: list[str] = field(default_factory=list)
    """Files (.jsonl, .jsonl.gz, .parquet), read in this order."""
    input_key: str = "prompt"
    """The prompt: text, or a list of {role, content} messages (needs chat_template)."""
    label_key: str = "label"
    """What the reward compares with; verl: reward_model.ground_truth."""
    metadata_key: str = "metadata"
    """Further facts for the reward, a mapping; may be absent. verl: extra_info."""
    data_source_key: str = "data_source"
    """Name of the set a row belongs to; may be absent."""
    reward_key: str = "reward"
    """Name of the row's own reward; may be absent (then rewards.by_source, rewards.reward)."""
    chat_template: str | None = None
    """A .jinja file, or the folder of a model that has one; turns messages (or text, as the user's) into the
    prompt."""
    add_bos: bool = True
    """Begin prompts without chat template with the tokenizer's BOS, if it has one."""
    max_prompt_tokens: int = 0
    """Longer prompts are left out and counted; 0: no limit."""
    shuffle: bool = True
    """A new order in every epoch; else the order of the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRecord:
    """One row. Example: PromptRecord(prompt=Prompt(prompt_id=7, tokens=(51,)), text="3", label="8")."""

    prompt: Prompt
    """Its number is that of the row, over all files, so it does not change when others are left out."""
    text: str
    label: str
    reward: str = ""
    """Name of its reward, "" where the configuration decides."""
    data_source: str = ""
    metadata: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """All prompts that are used, and how many were left out as too long."""

    records: list[PromptRecord]
    num_too_long: int = 0

    def __len__(self) -> int:
        return len(self.records)


def load_prompts(config: PromptDataConfig, tokenizer: Tokenizer) -> PromptSet:
    """Raises ValueError with file and row for a row that cannot be read, or when no prompt is left."""
    render = None if config.chat_template is None else load_chat_template(config.chat_template)
    records, too_long, number = [], 0, 0
    for name in config.prompt_data:
        for place, row in read_rows(Path(name)):
            record = _record(row, place, number=number, config=config, tokenizer=tokenizer, render=render)
            number += 1
            if config.max_prompt_tokens and len(record.prompt.tokens) > config.max_prompt_tokens:
                too_long += 1
            else:
                records.append(record)
    if not records:
        raise ValueError(
            f"no prompt in prompt_data {config.prompt_data}: {number} rows read, {too_long} longer than "
            f"max_prompt_tokens {config.max_prompt_tokens}"
        )
    return PromptSet(records=records, num_too_long=too_long)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """(place for messages, row) of a .jsonl, .jsonl.gz or .parquet file; ValueError for others."""
    if not path.is_file():
        raise ValueError(f"prompt_data {path} is no file")
    if path.suffix == ".parquet":
        from pyarrow import parquet  # 0.3 s to import, and only here needed

        rows = 0
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    rows += 1
                    yield f"{path}: row {rows}", row
        return
    if not path.name.endswith((".jsonl", ".json", ".jsonl.gz")):
        raise ValueError(f"prompt_data {path}: only .jsonl, .jsonl.gz and .parquet are read")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as stream:
        for line_number, line in enumerate(stream, 1):
            place = f"{path}:{line_number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place}: no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: not a JSON object but {type(row).__name__}")
            yield place, row


def _lookup(row: dict[str, object], key: str) -> object:
    """The value under a dotted key, None where it is absent."""
    value: object = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _record(
    row: dict[str, object],
    place: str,
    *,
    number: int,
    config: PromptDataConfig,
    tokenizer: Tokenizer,
    render: Render | None,
) -> PromptRecord:
    source, label = _lookup(row, config.input_key), _lookup(row, config.label_key)
    for key, value in ((config.input_key, source), (config.label_key, label)):
        if value is None:
            raise ValueError(f"{place} has no {key!r} (keys: {sorted(row)}): set input_key and label_key")
    if not isinstance(source, str) and render is None:
        raise ValueError(f"{place}: {config.input_key!r} holds messages, which need chat_template")
    metadata = _lookup(row, config.metadata_key) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{place}: {config.metadata_key!r} is no mapping but {type(metadata).__name__}")
    if render is None:
        text, tokens = source, encode_prompt(tokenizer, source, add_bos=config.add_bos)
    else:
        messages = [{"role": "user", "content": source}] if isinstance(source, str) else source
        text = render(messages)
        tokens = tokenizer.tokenize(text, parse_special=True)
    return PromptRecord(
        prompt=Prompt(prompt_id=number, tokens=tuple(tokens)),
        text=text,
        label=label if isinstance(label, str) else json.dumps(label),
        reward=str(_lookup(row, config.reward_key) or ""),
        data_source=str(_lookup(row, config.data_source_key) or ""),
        metadata=metadata,
    )


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_bos: bool = True) -> list[int]:
    """Ids of a prompt, with BOS where the tokenizer has one. Fine-tuning must encode prompts the same way."""
    begin = [tokenizer.bos] if add_bos and tokenizer.bos is not None else []
    return begin + tokenizer.tokenize(text)


def response_text(tokenizer: Tokenizer, tokens: Sequence[int], stop_token_ids: Sequence[int]) -> str:
    """The text that a reward sees: the response without the stop token that ended it."""
    ends = len(tokens) > 0 and tokens[-1] in set(stop_token_ids)
    return tokenizer.detokenize(tokens[:-1] if ends else tokens)


def load_chat_template(name: str) -> Render:
    """Messages -> text, by a .jinja file or the chat template of a model folder (transformers renders it)."""
    path = Path(name)
    settings: dict[str, object] = {}
    if path.is_dir():
        file = path / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        path = path / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"chat_template {name}: no .jinja file, and no folder of a model that has one")
    from transformers.utils.chat_template_utils import render_jinja_template  # seconds, only here needed

    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key in ("bos_token", "eos_token", "pad_token") and value is not None
    }

    def render(messages: list[dict[str, str]]) -> str:
        texts, _ = render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=True, **special
        )
        return texts[0]

    return render


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Order `[size]` in which an epoch takes the records: a pure function of these arguments."""
    if not shuffle:
        return np.arange(size)
    # RandomState: numpy guarantees its stream for all versions.
    return np.random.RandomState([seed & 0xFFFFFFFF, epoch]).permutation(size)


class PromptCursor:
    """Hands out record indices, each exactly once an epoch; its whole state is `consumed`.

    Example: cursor.take(2) -> [5, 0]; a cursor with consumed=2 goes on with the third. Record number
    `consumed` is entry consumed % size of epoch consumed // size, so a batch may span two epochs and a
    resumed run, whatever its number of ranks, takes the next ones.
    """

    def __init__(self, *, size: int, seed: int, shuffle: bool = True, consumed: int = 0) -> None:
        if size < 1 or consumed < 0:
            raise ValueError(f"a cursor needs size >= 1 and consumed >= 0, got {size} and {consumed}")
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._consumed = consumed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=int))

    @property
    def consumed(self) -> int:
        """Records handed out since the beginning."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """Epoch of the next record."""
        return self._consumed // self._size

    def take(self, count: int) -> list[int]:
        """The next `count` record indices."""
        taken = [self._at(position) for position in range(self._consumed, self._consumed + count)]
        self._consumed += count
        return taken

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self._size)
        if self._order[0] != epoch:
            order = epoch_order(self._size, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._order = (epoch, order)
        return int(self._order[1][place])

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {
            "consumed": self._consumed,
            "size": self._size,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises ValueError when the saved cursor ran over other data, seed or order."""
        mine = self.state_dict()
        other = {k: (state[k], mine[k]) for k in ("size", "seed", "shuffle") if state[k] != mine[k]}
        if other:
            raise ValueError(
                f"the prompt cursor was saved with other settings (saved, now): {other}: prompts would be "
                "repeated or left out; restore them, or start without the cursor"
            )
        self._consumed = state["consumed"]
