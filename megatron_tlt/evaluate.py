"""Loss and bits per byte of a checkpoint, or of two side by side, over a text or indexed file.

`python -m megatron_tlt.evaluate --load checkpoints/ --scoring.data_path valid.jsonl [--compare other/]`,
under torchrun with the layout that the model needs. Prints a table, and writes JSON where `output` says.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt.bridge.load import dtype_of, load_model
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.entry import run_entry
from megatron_tlt.evaluation.scoring import Score, ScoringConfig, score_text
from megatron_tlt.files import write_json
from megatron_tlt.parallel import Parallel, ParallelConfig

_ROWS = (
    ("iteration", "d"), ("loss", ".4f"), ("perplexity", ".2f"), ("bits_per_byte", ".4f"),
    ("num_documents", "d"), ("num_tokens", "d"), ("num_bytes", "d"), ("seconds", ".1f"),
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """What to evaluate on what."""

    load: str
    """Checkpoint folder (the newest iter_*), one iter_* folder, or a Hugging Face folder."""
    scoring: ScoringConfig
    """Data and windows."""
    parallel: ParallelConfig
    """Layout over the ranks."""
    compare: str | None = None
    """A second model, shown beside the first."""
    dtype: str | None = None
    """float32, bfloat16 or float16; default: as the weights are stored."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer of both models; default: the one that each checkpoint names."""
    output: str | None = None
    """JSON file to write."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            dtype_of(self.dtype)
        if self.output is not None and not Path(self.output).absolute().parent.is_dir():
            raise ValueError(f"output={self.output}: its folder does not exist")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for bad input (said in one line)."""
    return run_entry(
        EvaluateConfig,
        run,
        prog="python -m megatron_tlt.evaluate",
        description=__doc__,
        arguments=arguments,
    )


def run(config: EvaluateConfig, parallel: Parallel) -> None:
    """Score, and on rank 0 print the table and write `output`. Collective over the world."""
    scores = evaluate_models(config, parallel)
    if parallel.rank == 0:
        print(table(scores), flush=True)
        if config.output is not None:
            write_json(Path(config.output), as_json(config, scores))


def evaluate_models(config: EvaluateConfig, parallel: Parallel) -> list[Score]:
    """The score of `load` and, where given, of `compare`; one model in memory at a time.

    Collective over the world. Raises ValueError for what cannot be loaded or scored.
    """
    dtype = dtype_of(config.dtype) if config.dtype else None
    paths = [config.load] if config.compare is None else [config.load, config.compare]
    return [
        score_text(
            load_model(path, parallel, dtype=dtype, tokenizer=config.tokenizer),
            parallel,
            config.scoring,
            load=path,
        )
        for path in paths
    ]


def as_json(config: EvaluateConfig, scores: list[Score]) -> dict[str, object]:
    """What `output` holds: the scoring options and a record per model."""
    return {"scoring": asdict(config.scoring), "scores": [asdict(score) for score in scores]}


def table(scores: list[Score]) -> str:
    """One column a model; with two, a third with second minus first."""
    names = ["", *(Path(score.load).name for score in scores)]
    if len(scores) == 2:
        names.append("difference")
    lines = [names]
    for field, form in _ROWS:
        values = [getattr(score, field) for score in scores]
        if None not in values and len(values) == 2 and form != "d":
            values.append(values[1] - values[0])
        lines.append([field, *("-" if value is None else format(value, form) for value in values)])
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(names))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(line[1:], widths[1:]))]
        ).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
