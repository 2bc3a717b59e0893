"""SFT: `torchrun --nproc_per_node N -m megatron_tlt.sft --config run.yaml [--key value]`."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

from megatron_tlt.bridge.finetune import Policy, Source, build_policy, find_source
from megatron_tlt.config import build_parser, parse, to_yaml
from megatron_tlt.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from megatron_tlt.entry import EXIT_BAD_INPUT
from megatron_tlt.files import write_text
from megatron_tlt.metrics import JsonlSink, MetricSinks, TensorBoardSink
from megatron_tlt.models.gpt import ModelConfig, model_identity
from megatron_tlt.parallel import (
    Parallel,
    ParallelConfig,
    init_parallel,
    shutdown_parallel,
    world_size_from_env,
)
from megatron_tlt.train.checkpoint import (
    CheckpointConfig,
    TrainState,
    check_identity,
    save_checkpoint,
)
from megatron_tlt.train.config import LoggingConfig
from megatron_tlt.train.optimizer import OptimizerConfig, build_scheduler, gathered_parameters
from megatron_tlt.train.sft import (
    Examples,
    SftDataConfig,
    SftTrainer,
    SftTrainingConfig,
    read_examples,
)

EXIT_NONFINITE = 3


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """A fine-tuning run. Every key here is a key of the YAML file and of the command line."""

    parallel: ParallelConfig
    """Layout over the ranks."""
    data: SftDataConfig
    """Examples."""
    training: SftTrainingConfig
    """The loop."""
    optimizer: OptimizerConfig
    """AdamW, schedules, gradient reduction."""
    checkpoint: CheckpointConfig
    """Saving and loading; load takes a checkpoint of any stage, or a Hugging Face folder."""
    logging: LoggingConfig
    """Log line, metrics files."""
    model: ModelConfig | None = None
    """Shape of the model; default: the checkpoint's."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer; default: the one that the checkpoint names."""
    pretrained_checkpoint: str | None = None
    """Where the weights come from while checkpoint.load is the still empty folder of checkpoint.save."""

    @property
    def log_dir(self) -> Path:
        if self.logging.log_dir is not None:
            return Path(self.logging.log_dir)
        return Path(self.checkpoint.save or ".") / "logs"

    @property
    def tensorboard_dir(self) -> Path:
        given = self.logging.tensorboard_dir
        return Path(given) if given is not None else self.log_dir / "tensorboard"


@dataclass(frozen=True, kw_only=True, slots=True)
class SftInputs:
    """What a run reads before any process group exists."""

    source: Source
    tokenizer: Tokenizer
    train_data: Examples
    valid_data: Examples | None


def read_inputs(config: SftConfig) -> SftInputs:
    """Checkpoint facts, tokenizer and examples. Raises ValueError for bad input."""
    config.optimizer.schedule_iters(config.training.train_iters)
    source = find_source(
        config.checkpoint, stage="sft", model=config.model, tokenizer=config.tokenizer,
        pretrained=config.pretrained_checkpoint,
    )  # fmt: skip
    if source.tokenizer is None:
        raise ValueError(f"{source.folder} names no tokenizer: give tokenizer.tokenizer_type")
    tokenizer = build_tokenizer(source.tokenizer)
    if source.state is not None and source.state.tokenizer:
        check_identity("tokenizer", source.state.tokenizer, tokenizer.identity())
    source.model.check_layout(config.parallel)
    longest = min(
        config.data.max_length or source.model.max_position_embeddings,
        source.model.max_position_embeddings,
        config.training.max_tokens_per_gpu,
    )
    data = config.data
    train_data = read_examples(data.train_data_path, data, tokenizer, max_length=longest)
    valid_data = None
    if data.valid_data_path:
        valid_data = read_examples(data.valid_data_path, data, tokenizer, max_length=longest)
    return SftInputs(source=source, tokenizer=tokenizer, train_data=train_data, valid_data=valid_data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for bad input (said in one line), 3 for a non-finite loss."""
    rank = int(os.environ.get("RANK", "0"))
    parser = build_parser(
        SftConfig,
        prog="python -m megatron_tlt.sft",
        description=__doc__,
        flags={"dry_run": "Check everything, print what would be trained, and exit."},
    )
    try:
        config, flags = parse(parser, SftConfig, arguments)
        config.parallel.data_parallel_size(world_size_from_env())
        inputs = read_inputs(config)
    except ValueError as error:
        if rank == 0:  # all ranks read the same input
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    if rank == 0:
        print(to_yaml(config) + _describe(config, inputs), flush=True)
    return 0 if flags.get("dry_run") else _train(config, inputs)


def _describe(config: SftConfig, inputs: SftInputs) -> str:
    data, size = inputs.train_data, config.training.global_batch_size
    tokens = sum(map(len, data.prompts)) + sum(map(len, data.responses))
    return (
        f" policy from {inputs.source.folder or 'random weights'}; {len(data)} examples of {tokens} tokens "
        f"({data.num_too_long} too long), {len(data) / size:.1f} steps an epoch"
    )


def _train(config: SftConfig, inputs: SftInputs) -> int:
    parallel = init_parallel(config.parallel, seed=config.training.seed)
    try:
        trainer, policy = build_trainer(config, inputs, parallel)
        state = restored_state(config, inputs, trainer, policy)
    except ValueError as error:
        print(f"error: [rank {parallel.rank}] {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    if not run(config, trainer, policy, state, parallel):
        return EXIT_NONFINITE
    shutdown_parallel()
    return 0


def build_trainer(
    config: SftConfig, inputs: SftInputs, parallel: Parallel
) -> tuple[SftTrainer, Policy]:
    """Model, optimizer and schedule, filled from the source; collective over the world."""
    training = config.training
    policy = build_policy(
        inputs.source, parallel, optimizer=config.optimizer, dtype=training.params_dtype,
        seed=training.seed, vocab_size=inputs.tokenizer.vocab_size,
    )  # fmt: skip
    scheduler = build_scheduler(
        policy.optimizer,
        config.optimizer,
        train_iters=training.train_iters,
        samples_after=lambda steps: steps * training.global_batch_size,
    )
    trainer = SftTrainer(
        config=training, parallel=parallel, model=policy.model, chunks=policy.chunks,
        optimizer=policy.optimizer, scheduler=scheduler, train_data=inputs.train_data,
        valid_data=inputs.valid_data,
    )  # fmt: skip
    return trainer, policy


def restored_state(
    config: SftConfig, inputs: SftInputs, trainer: SftTrainer, policy: Policy
) -> TrainState:
    """Fresh, or the checkpoint's with the learning rate at its position.

    Raises ValueError when the checkpoint ran over other examples.
    """
    source, identity = inputs.source, inputs.train_data.identity()
    named = {"tokenizer": asdict(source.tokenizer), "vocab_size": policy.vocab_size}
    if source.resumes:
        check_identity("set of examples", source.state.data["examples"], identity)
        trainer.scheduler.step(increment=source.state.consumed_train_samples)
        source.state.config = asdict(config) | named
        return source.state
    return TrainState(
        model=model_identity(policy.config),
        tokenizer=inputs.tokenizer.identity(),
        data={"stage": "sft", "examples": identity},
        seed=config.training.seed,
        config=asdict(config) | named,
    )


def run(
    config: SftConfig, trainer: SftTrainer, policy: Policy, state: TrainState, parallel: Parallel
) -> bool:
    """Train to the last step; False when a loss or gradient norm was not finite (said in one line)."""
    logs, options, training = parallel.is_last_rank, config.checkpoint, config.training
    sinks = MetricSinks(_sinks(config) if logs else [])
    say = _print if logs else _silent
    while state.iteration < training.train_iters:
        metrics = trainer.step(consumed=state.consumed_train_samples)
        if not metrics.pop("updated"):
            say(f"error: step {state.iteration + 1}: loss {metrics['lm loss']}, gradient norm "
                f"{metrics['grad-norm']}; the update was not made")  # fmt: skip
            return False
        state.iteration += 1
        state.consumed_train_samples += training.global_batch_size
        state.consumed_train_tokens += int(metrics["tokens"])
        last = state.iteration == training.train_iters
        where = dict(iteration=state.iteration, samples=state.consumed_train_samples)
        if last or state.iteration % config.logging.log_interval == 0:
            say(step_line(metrics, iteration=state.iteration, train_iters=training.train_iters))
            sinks.write("train", metrics, **where)
        if last or _is_multiple(state.iteration, training.eval_interval):
            loss = trainer.evaluate()
            if loss is not None:
                say(f" validation loss at iteration {state.iteration} | lm loss value: {loss:.6E} |")
                sinks.write("validation", {"lm loss validation": loss}, **where)
        if options.save and (last or _is_multiple(state.iteration, options.save_interval)):
            state.scheduler = trainer.scheduler.state_dict()
            with gathered_parameters(trainer.chunks):
                save_checkpoint(
                    options.save, state, policy.model, policy.optimizer, groups=parallel.groups,
                    keep_last=options.keep_last,
                )  # fmt: skip
            say(f" saved checkpoint of iteration {state.iteration} to {options.save}")
    sinks.close()
    return True


def step_line(metrics: Mapping[str, float], *, iteration: int, train_iters: int) -> str:
    """The line of one step, in Megatron's style."""
    seconds = metrics["iteration-time"]
    parts = [
        f"iteration {iteration:8d}/{train_iters:8d}",
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f}",
        f"learning rate: {metrics['learning-rate']:.6E}",
        f"lm loss: {metrics['lm loss']:.6E}",
        f"grad norm: {metrics['grad-norm']:.3f}",
        f"response tokens: {metrics['response-tokens']:.0f}",
        f"tokens/s: {metrics['tokens'] / seconds:.0f}",
        f"ETA: {timedelta(seconds=round((train_iters - iteration) * seconds))}",
    ]
    return f" [{datetime.now()}] " + " | ".join(parts) + " |"


def _sinks(config: SftConfig) -> list:
    sinks = [JsonlSink(config.log_dir / "metrics.jsonl"), TensorBoardSink(config.tensorboard_dir)]
    write_text(config.log_dir / "config.yaml", to_yaml(config))
    return sinks


def _print(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    """What the ranks other than the last do with a line."""


def _is_multiple(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


if __name__ == "__main__":
    sys.exit(main())
