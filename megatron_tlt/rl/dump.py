"""Responses with their rewards as they cross from generation to training, and as JSON lines on disk."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_tlt.data.rewards import RewardResult
from megatron_tlt.files import write_text
from megatron_tlt.types import FinishReason, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One scored response. `group` numbers its prompt within the step, in the order of the prompt cursor."""

    group: int
    rollout: Rollout
    reward: RewardResult

    @property
    def truncated(self) -> bool:
        """Whether it ended at the length limit."""
        return self.rollout.finish_reason == FinishReason.LENGTH

    @property
    def usable(self) -> bool:
        """Whether there is a verdict on a finished response."""
        return not self.reward.error and self.rollout.finish_reason != FinishReason.ABORT


def dump_path(folder: str | Path, step: int) -> Path:
    """The file of one step, counted from 1."""
    return Path(folder) / f"rollout_{step:07d}.jsonl"


def write_dump(folder: str | Path, step: int, samples: Iterable[Sample]) -> Path:
    """Publish the samples of a step, one JSON object a line."""
    path = dump_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(_to_json(sample)) + "\n" for sample in samples))
    return path


def read_dump(folder: str | Path, step: int) -> list[Sample]:
    """The samples of a step. Raises ValueError when there is no such file, or a line is no sample."""
    path = dump_path(folder, step)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the dump has no step {step}")
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            samples.append(_from_json(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is no rollout: {error}") from error
    return samples


def _to_json(sample: Sample) -> dict[str, object]:
    return {"group": sample.group, **asdict(sample.rollout), "reward": asdict(sample.reward)}


def _from_json(record: dict) -> Sample:
    values = {field.name: record[field.name] for field in fields(Rollout)}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    values["finish_reason"] = FinishReason(values["finish_reason"])
    rollout = Rollout(**values)
    for name in ("log_probs", "weight_versions"):
        if len(getattr(rollout, name)) != len(rollout.tokens):
            raise ValueError(
                f"{len(rollout.tokens)} tokens but {len(getattr(rollout, name))} {name}"
            )
    return Sample(
        group=record["group"], rollout=rollout, reward=RewardResult(**record["reward"])
    )


def in_order(samples: Sequence[Sample]) -> list[Sample]:
    """By prompt of the step, then by number: the same on every rank and for any schedule."""
    return sorted(samples, key=lambda s: (s.group, s.rollout.sample_index))
