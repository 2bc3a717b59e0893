"""Text from a checkpoint or a Hugging Face folder, printed as it is made.

`python -m megatron_tlt.generate --load checkpoints/ --prompt "Once upon a time"`; without prompt it asks for
one, line after line. Under torchrun with the layout that the model needs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.bridge.load import LoadedModel, dtype_of, load_model
from megatron_tlt.bridge.verify import on_first_rank
from megatron_tlt.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from megatron_tlt.entry import run_entry
from megatron_tlt.evaluation.decoding import DecodingConfig, TextStream, generate_tokens
from megatron_tlt.parallel import Parallel, ParallelConfig


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """What to generate from what."""

    load: str
    """Checkpoint folder (the newest iter_*), one iter_* folder, or a Hugging Face folder."""
    decoding: DecodingConfig
    """Choice of tokens."""
    parallel: ParallelConfig
    """Layout over the ranks."""
    prompt: str | None = None
    """Text to go on from."""
    prompt_file: str | None = None
    """File whose whole text is the prompt."""
    parse_special: bool = False
    """Read the tokenizer's special tokens, such as <|im_start|>, where the prompt spells them."""
    dtype: str | None = None
    """float32, bfloat16 or float16; default: as the weights are stored."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer; default: the one that the checkpoint names."""

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("give prompt or prompt_file, not both")
        if self.prompt_file is not None and not Path(self.prompt_file).is_file():
            raise ValueError(f"prompt_file={self.prompt_file} is no file")
        if self.dtype is not None:
            dtype_of(self.dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for bad input (said in one line)."""
    return run_entry(
        GenerateConfig,
        lambda config, parallel: run(config, parallel, write=_print),
        prog="python -m megatron_tlt.generate",
        description=__doc__,
        arguments=arguments,
    )


def _print(text: str) -> None:
    print(text, end="", flush=True)


def run(config: GenerateConfig, parallel: Parallel, *, write: Callable[[str], object]) -> None:
    """Load, then answer every prompt; `write` gets the text on rank 0. Collective over the world.

    Raises ValueError for what cannot be loaded, and for a prompt without tokens.
    """
    dtype = dtype_of(config.dtype) if config.dtype else None
    loaded = load_model(config.load, parallel, dtype=dtype, tokenizer=config.tokenizer)
    if loaded.tokenizer is None:
        raise ValueError(f"{config.load} names no tokenizer: give tokenizer.tokenizer_type")
    tokenizer = build_tokenizer(loaded.tokenizer)
    say = write if parallel.rank == 0 else _silent
    for prompt in _prompts(config):
        for piece in answer(config, loaded, parallel, tokenizer, prompt=prompt):
            say(piece)
        say("\n")


def _silent(text: str) -> None:
    """What the ranks other than the first do with text."""


def answer(
    config: GenerateConfig,
    loaded: LoadedModel,
    parallel: Parallel,
    tokenizer: Tokenizer,
    *,
    prompt: str,
) -> Iterator[str]:
    """The text after `prompt` in pieces, without the end-of-sequence token that ends it."""
    ids = tokenizer.tokenize(prompt, parse_special=config.parse_special)
    if not ids and tokenizer.eod is not None:
        ids = [tokenizer.eod]  # as a document begins in pretraining data
    stream = TextStream(tokenizer.detokenize, ids)
    ends = None if config.decoding.ignore_eos else tokenizer.eos
    for token in generate_tokens(
        loaded.chunks, parallel, ids, config.decoding, eos=tokenizer.eos
    ):
        if token != ends:
            yield stream.add(token)
    yield stream.rest()


def _prompts(config: GenerateConfig) -> Iterator[str]:
    """The given prompt, or lines from rank 0's terminal until it ends."""
    if config.prompt is not None:
        yield config.prompt
    elif config.prompt_file is not None:
        yield Path(config.prompt_file).read_text(encoding="utf-8")
    else:
        while (line := on_first_rank(_ask)) is not None:
            yield line


def _ask() -> str | None:
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


if __name__ == "__main__":
    sys.exit(main())
