"""Lessons for the drafter on one rank: this step's finished responses, and the longest of the step before.

Training in the tail of a rollout sees early, hence short responses only. One-step-off sampling (TLT,
https://arxiv.org/abs/2511.16665) mixes in the long ones of the previous step; they are kept first, here and
where room is short. What is drawn is uniform over rows, so a response weighs as its tokens do. The store is
bounded, lives on the host, survives between steps, and goes into the checkpoint with a digest.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from megatron_tlt.rollout.checksum import weights_checksum
from megatron_tlt.types import FeatureSample

_COLUMNS = ("prompt_id", "sample_index", "tokens", "context", "version", "step")


@dataclass(slots=True)
class _Held:
    sample: FeatureSample
    step: int
    weight: float = 1.0

    @property
    def rows(self) -> int:
        return len(self.sample.hidden)


class DraftBuffer:
    """At most `max_rows` rows. Example: buffer.begin_step(3); buffer.add(engine.take_features());
    buffer.draw(1024) -> samples of at most 1024 rows together."""

    def __init__(self, max_rows: int, *, seed: int, kept_share: float = 0.5) -> None:
        if max_rows < 2 or not 0 <= kept_share <= 1:
            raise ValueError(
                f"max_rows={max_rows}, kept_share={kept_share}: need max_rows >= 2 and a share of 0 to 1"
            )
        self.max_rows, self.kept_share, self.seed = max_rows, kept_share, seed
        self.step = self.draws = 0
        self._held: list[_Held] = []

    @property
    def num_rows(self) -> int:
        return sum(held.rows for held in self._held)

    @property
    def num_samples(self) -> int:
        return len(self._held)

    @property
    def lengths(self) -> list[int]:
        """Rows of each sample, oldest first."""
        return [held.rows for held in self._held]

    @property
    def newest_version(self) -> int:
        """Newest policy version among the lessons; -1 without any."""
        return max((held.sample.weight_version for held in self._held), default=-1)

    def begin_step(self, step: int) -> None:
        """Of the step before keep the longest, up to `kept_share` of the room; drop what is older."""
        self.step, room = step, int(self.kept_share * self.max_rows)
        kept = []
        for held in sorted(self._held, key=lambda held: -held.rows):
            if held.step == step - 1 and held.rows <= room:
                room -= held.rows
                kept.append(held)
        self._held = kept

    def absorb(self, other: "DraftBuffer") -> None:
        """Take over what another one holds; where room is short the shortest make way."""
        self.step, self.draws = max(self.step, other.step), max(self.draws, other.draws)
        self._held += other._held
        self._make_room()

    def add(self, samples: Iterable[FeatureSample]) -> None:
        """Take finished responses of this step; where room is short the shortest of them make way."""
        for sample in samples:
            if len(sample.hidden) > 1:  # one row has nothing after it to learn
                self._held.append(_Held(_on_host(sample), self.step))
        self._make_room()

    def _make_room(self) -> None:
        rows = self.num_rows
        if rows <= self.max_rows:
            return
        for held in sorted(self._held, key=lambda held: (-held.step, held.rows)):
            if rows <= self.max_rows:
                return
            self._held.remove(held)
            rows -= held.rows

    def weigh(self, weights: Mapping[tuple[int, int], float]) -> None:
        """Weights above 0 of responses of this step by (prompt_id, sample_index), e.g. from their rewards."""
        for held in self._held:
            key = (held.sample.prompt_id, held.sample.sample_index)
            if held.step == self.step and key in weights:
                held.weight = weights[key]

    def draw(self, rows: int) -> list[FeatureSample]:
        """Some of the samples, `rows` rows or all together; the last one is cut to a random window.

        A sample comes with a chance proportional to its rows and its weight, without replacement
        (Efraimidis and Spirakis, https://doi.org/10.1016/j.ipl.2005.11.003). Which ones depends on seed
        and the number of draws before alone.
        """
        rng = random.Random(f"{self.seed}:{self.draws}")
        self.draws += 1
        keys = [rng.random() ** (1 / (held.rows * held.weight)) for held in self._held]
        order = sorted(range(len(keys)), key=lambda i: -keys[i])
        drawn: list[FeatureSample] = []
        for place in order:
            sample = self._held[place].sample
            count = len(sample.hidden)
            if rows < 2:
                break
            if count > rows:
                sample = window(sample, rng.randrange(count - rows + 1), rows)
            rows -= len(sample.hidden)
            drawn.append(sample)
        return drawn

    def digest(self) -> str:
        """128 bits over all that `state` holds."""
        return weights_checksum(self.state().items())

    def state(self) -> dict[str, torch.Tensor]:
        """The whole store as tensors, for a file."""
        samples = [held.sample for held in self._held]
        table = [
            (s.prompt_id, s.sample_index, len(s.tokens), len(s.context_tokens), s.weight_version, held.step)
            for s, held in zip(samples, self._held, strict=True)
        ]
        tokens = [t for s in samples for t in s.context_tokens + s.tokens]
        state = {
            "table": torch.tensor(table, dtype=torch.int64).view(-1, len(_COLUMNS)),
            "tokens": torch.tensor(tokens, dtype=torch.int64),
            "weights": torch.tensor([held.weight for held in self._held], dtype=torch.float64),
            "counts": torch.tensor([self.step, self.draws]),
        }
        if samples:
            state["hidden"] = torch.cat([s.hidden for s in samples])
        if samples and samples[0].last_hidden is not None:
            state["last_hidden"] = torch.cat([s.last_hidden for s in samples])
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Become what `state` was taken from."""
        self.step, self.draws = state["counts"].tolist()
        self._held, first = [], 0
        tokens = state["tokens"].tolist()
        for row, weight in zip(state["table"].tolist(), state["weights"].tolist(), strict=True):
            prompt_id, sample_index, own, context, version, step = row
            last = first + own + context
            sample = FeatureSample(
                prompt_id=prompt_id,
                sample_index=sample_index,
                tokens=tuple(tokens[first + context : last]),
                context_tokens=tuple(tokens[first : first + context]),
                hidden=state["hidden"][first:last].clone(),
                last_hidden=state["last_hidden"][first:last].clone() if "last_hidden" in state else None,
                weight_version=version,
            )
            self._held.append(_Held(sample, step, weight))
            first = last


def window(sample: FeatureSample, start: int, rows: int) -> FeatureSample:
    """Rows `start` to `start + rows` of a sample."""
    context = len(sample.context_tokens)
    tokens = (sample.context_tokens + sample.tokens)[start : start + rows]
    left = max(0, min(context - start, rows))
    last = sample.last_hidden
    return replace(
        sample,
        tokens=tokens[left:],
        context_tokens=tokens[:left],
        hidden=sample.hidden[start : start + rows],
        last_hidden=None if last is None else last[start : start + rows],
    )


def _on_host(sample: FeatureSample) -> FeatureSample:
    last = sample.last_hidden
    return replace(
        sample, hidden=sample.hidden.cpu(), last_hidden=None if last is None else last.cpu()
    )
