"""An RL run put together: policy, engine, prompts, rewards, and what a checkpoint restores of them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from megatron_tlt.bridge.finetune import Policy, Source, build_policy, find_source
from megatron_tlt.data.prompts import PromptCursor, PromptSet, load_prompts
from megatron_tlt.data.reward_workers import build_scorer
from megatron_tlt.data.rewards import choose_reward
from megatron_tlt.data.tokenizer import Tokenizer, build_tokenizer
from megatron_tlt.models.gpt import ModelConfig, build_chunks, model_identity
from megatron_tlt.models.hf_config import architecture_of_model, hf_config_from_model
from megatron_tlt.parallel import Parallel, world_store
from megatron_tlt.rl.config import RlConfig
from megatron_tlt.rl.drafting import Drafting, NoDrafting, SpotDrafting, build_drafter
from megatron_tlt.rl.engine_trace import EngineTrace, NoTrace, engine_trace_path
from megatron_tlt.rl.engines import build_engine, close_engine
from megatron_tlt.rl.evaluation import Evaluator
from megatron_tlt.rl.generation import Collector, Generator
from megatron_tlt.rl.phases import PhaseClock
from megatron_tlt.rl.schedule import FeedMaker, LengthPredictor, Replica, gather_everywhere
from megatron_tlt.rl.speculation import build_drafting, build_tuner
from megatron_tlt.rl.timeline import Timeline, timeline_path
from megatron_tlt.rl.trainer import PolicyTrainer, copy_weights
from megatron_tlt.rl.weight_sync import WeightPublisher
from megatron_tlt.rollout.engine import RolloutEngine
from megatron_tlt.train.checkpoint import (
    CheckpointSaver,
    TrainState,
    check_identity,
    iteration_folder,
    load_checkpoint,
)
from megatron_tlt.train.optimizer import build_scheduler
from megatron_tlt.types import SamplingParams

REFERENCE = "reference"
"""Folder beside the checkpoints that holds the reference's weights."""
_GIB = 2**30


@dataclass(kw_only=True, slots=True)
class RlRun:
    """Everything that the loop works on. Engine, collector and evaluator are None under debug_train_only."""

    config: RlConfig
    parallel: Parallel
    tokenizer: Tokenizer
    policy: Policy
    trainer: PolicyTrainer
    clock: PhaseClock
    cursor: PromptCursor
    predictor: LengthPredictor
    engine: RolloutEngine | None
    publisher: WeightPublisher | None
    collector: Collector | None
    evaluator: Evaluator | None
    drafting: Drafting
    saver: CheckpointSaver
    state: TrainState
    reference_iteration: int = 0
    """Iteration of the policy that the reference is a copy of."""

    def close(self) -> None:
        """End the reward workers, and the thread that writes checkpoints."""
        self.saver.close()
        close_engine(self.engine)
        if self.collector is not None:
            self.collector.generator.scorer.close()


def find_policy(config: RlConfig) -> tuple[Source, Tokenizer]:
    """Where the policy comes from and its tokenizer; reads small files only. Raises ValueError."""
    source = find_source(
        config.checkpoint,
        stage="rl",
        model=config.model,
        tokenizer=config.tokenizer,
        pretrained=config.pretrained_checkpoint,
    )
    if source.tokenizer is None:
        raise ValueError(f"{source.folder} names no tokenizer: give tokenizer.tokenizer_type")
    tokenizer = build_tokenizer(source.tokenizer)
    if source.state is not None and source.state.tokenizer:
        check_identity("tokenizer", source.state.tokenizer, tokenizer.identity())
    source.model.check_layout(config.parallel)
    granularity = config.training.recompute_granularity
    if granularity is not None:
        source = replace(source, model=replace(source.model, recompute_granularity=granularity))
    return source, tokenizer


def load_prompt_sets(config: RlConfig, tokenizer: Tokenizer) -> tuple[PromptSet, dict[str, PromptSet]]:
    """Training prompts and the evaluation sets by name. Raises ValueError for what cannot be read."""
    sets = {}
    for number, (name, files) in enumerate(config.evaluation.sets.items(), 1):
        found = load_prompts(replace(config.data, prompt_data=files), tokenizer)
        limit = config.evaluation.max_prompts or len(found)
        # Numbers of their own, so that no set is taken for another's prompts.
        records = [
            replace(r, prompt=replace(r.prompt, prompt_id=r.prompt.prompt_id + (number << 40)))
            for r in found.records[:limit]
        ]
        sets[name] = PromptSet(records=records, num_too_long=found.num_too_long)
    return load_prompts(config.data, tokenizer), sets


def longest_sequence(
    config: RlConfig, model: ModelConfig, train: PromptSet, sets: Mapping[str, PromptSet]
) -> int:
    """Tokens of the longest prompt plus the longest response. Raises ValueError where the model, or a
    micro-batch, has fewer."""
    evaluation = config.evaluation.max_response_len or config.rollout.max_response_len
    needs = [max(len(r.prompt.tokens) for r in train.records) + config.rollout.max_response_len]
    if needs[0] > config.training.max_tokens_per_gpu:
        raise ValueError(
            f"a prompt and a response of rollout.max_response_len={config.rollout.max_response_len} may "
            f"have {needs[0]} tokens, more than training.max_tokens_per_gpu="
            f"{config.training.max_tokens_per_gpu}: raise it"
        )
    needs += [max(len(r.prompt.tokens) for r in s.records) + evaluation for s in sets.values()]
    if max(needs) > model.max_position_embeddings:
        raise ValueError(
            f"the longest prompt and response may have {max(needs)} tokens, the model has "
            f"max_position_embeddings={model.max_position_embeddings}: lower rollout.max_response_len or "
            "set data.max_prompt_tokens"
        )
    return max(needs)


def build_run(config: RlConfig, parallel: Parallel) -> RlRun:
    """Build and restore; collective over the world. Raises ValueError for bad input."""
    config.check(parallel.world_size)
    source, tokenizer = find_policy(config)
    train, sets = load_prompt_sets(config, tokenizer)
    longest = longest_sequence(config, source.model, train, sets)
    training = config.training
    policy = build_policy(
        source, parallel, optimizer=config.optimizer, dtype=training.params_dtype,
        seed=training.seed, vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    cursor = PromptCursor(size=len(train), seed=training.seed, shuffle=config.data.shuffle)
    timeline = Timeline(rank=parallel.rank, path=timeline_path(config.log_dir, parallel.rank))
    clock = PhaseClock(budget_bytes=training.memory_budget_gib * _GIB, timeline=timeline)
    run = RlRun(
        config=config, parallel=parallel, tokenizer=tokenizer, policy=policy,
        trainer=_build_trainer(config, parallel, policy), clock=clock, cursor=cursor,
        predictor=LengthPredictor(), engine=None, publisher=None, collector=None,
        evaluator=None, drafting=NoDrafting(), saver=_build_saver(config, parallel),
        state=_fresh_state(config, source, tokenizer, policy),
    )  # fmt: skip
    if source.resumes:
        _restore(run, source)
    if not config.debug_train_only:
        _add_engine(run, train, sets, longest=longest)
    if source.resumes and run.engine is not None:
        _restore_speculation(run, source)
    return run


def _build_saver(config: RlConfig, parallel: Parallel) -> CheckpointSaver:
    options = config.checkpoint
    return CheckpointSaver(
        options.save or ".", groups=parallel.groups, keep_last=options.keep_last,
        async_save=options.async_save,
    )  # fmt: skip


def _build_trainer(config: RlConfig, parallel: Parallel, policy: Policy) -> PolicyTrainer:
    reference = None
    if config.algorithm.needs_reference:
        reference = build_chunks(
            policy.config, parallel, vocab_size=policy.vocab_size,
            params_dtype=config.training.params_dtype,
        )  # fmt: skip
        copy_weights(policy.chunks, reference)
    updates = config.rollout.num_samples // config.global_batch_size * config.training.num_epochs
    return PolicyTrainer(
        config=config.algorithm,
        parallel=parallel,
        chunks=policy.chunks,
        optimizer=policy.optimizer,
        scheduler=build_scheduler(
            policy.optimizer,
            config.optimizer,
            train_iters=config.training.train_iters,
            samples_after=lambda steps: steps * updates,
        ),
        vocab_size=policy.vocab_size,
        temperature=config.rollout.temperature,
        num_epochs=config.training.num_epochs,
        reference=reference,
        reuse_forward=config.training.reuse_forward,
    )


def _fresh_state(
    config: RlConfig, source: Source, tokenizer: Tokenizer, policy: Policy
) -> TrainState:
    named = {"tokenizer": asdict(source.tokenizer), "vocab_size": policy.vocab_size}
    return TrainState(
        model=model_identity(policy.config),
        tokenizer=tokenizer.identity(),
        data={"stage": "rl"},
        seed=config.training.seed,
        config=asdict(config) | named,
    )


def _restore(run: RlRun, source: Source) -> None:
    """Counters, prompt cursor, learning-rate position, reference and length history of a checkpoint.

    Raises ValueError when the prompts are others than those that were consumed.
    """
    saved = source.state
    run.cursor.load_state_dict(saved.data["cursor"])
    run.predictor.load_state_dict(saved.data["lengths"])
    run.trainer.scheduler.step(increment=int(saved.scheduler["num_steps"]))
    run.reference_iteration = saved.data["reference"]
    if run.trainer.reference is not None:
        folder = iteration_folder(source.folder.parent / REFERENCE, run.reference_iteration)
        load_checkpoint(folder, run.trainer.reference, None, groups=run.parallel.groups)
    fresh, run.state = run.state, saved
    run.state.config = fresh.config


def _restore_speculation(run: RlRun, source: Source) -> None:
    """What the engine's bandit has learned, and the drafter."""
    tuners, drafter = run.state.data["tuners"], run.state.data["drafter"]
    if tuners:
        run.engine.load_tuner_state(tuners[Replica.of(run.parallel).index % len(tuners)])
    if drafter and isinstance(run.drafting, SpotDrafting):
        run.drafting.load(drafter, source.folder)


def state_to_save(run: RlRun) -> TrainState:
    """The run's state with all that a resume needs; collective over the world."""
    tuners = run.state.data.get("tuners", [])  # of a run without an engine
    if run.engine is not None:
        learned = run.engine.tuner_state()
        tuners = gather_everywhere([learned] if learned else [], run.parallel)
    run.state.scheduler = run.trainer.scheduler.state_dict()
    run.state.data = {
        "stage": "rl",
        "cursor": run.cursor.state_dict(),
        "lengths": run.predictor.state_dict(),
        "tuners": tuners,
        "reference": run.reference_iteration,
        "drafter": run.drafting.state_dict(),
    }
    return run.state


def _add_engine(
    run: RlRun, train: PromptSet, sets: Mapping[str, PromptSet], *, longest: int
) -> None:
    config, parallel, rollout = run.config, run.parallel, run.config.rollout
    model = run.policy.config
    target = hf_config_from_model(model, vocab_size=run.policy.vocab_size)
    drafter = None
    if config.drafts:
        drafter = build_drafter(config.drafter, target, seed=config.training.seed)
    run.engine = build_engine(
        config, parallel, target, max_model_len=longest, policy=build_tuner(config),
        drafter=None if drafter is None else drafter.config,
    )  # fmt: skip
    if drafter is not None:
        run.drafting = build_drafting(config, drafter, run.engine, parallel, run.clock.timeline)
    run.publisher = WeightPublisher(
        run.policy.model,
        parallel,
        architecture=architecture_of_model(model),
        bucket_bytes=rollout.sync_bucket_mib * 2**20,
        checksum=rollout.check_weight_update,
    )
    generator = Generator(
        engine=run.engine,
        parallel=parallel,
        tokenizer=run.tokenizer,
        rewards=config.rewards,
        scorer=build_scorer(config.rewards, _reward_names(config, [train, *sets.values()])),
        feeds=FeedMaker(parallel, world_store() if rollout.schedule == "shared" else None),
        predictor=run.predictor,
        slots=rollout.max_running_requests,
        offloads=rollout.offloads,
        clock=run.clock,
        drafting=run.drafting,
        trace=EngineTrace(
            run.engine, rank=parallel.rank, path=engine_trace_path(config.log_dir, parallel.rank),
            interval=rollout.trace_interval,
        ),
    )  # fmt: skip
    params = sampling_params(config, run.tokenizer)
    run.collector = Collector(
        generator=generator, algorithm=config.algorithm, prompts=train, cursor=run.cursor,
        params=params, rollout_batch_size=rollout.rollout_batch_size,
        max_response_len=rollout.max_response_len,
    )  # fmt: skip
    evaluation = config.evaluation
    run.evaluator = Evaluator(
        generator=replace(generator, predictor=LengthPredictor(), drafting=NoDrafting(), trace=NoTrace()),
        sets=sets,
        params=replace(
            params, n=evaluation.n_samples, temperature=evaluation.temperature, top_k=0,
            top_p=evaluation.top_p, max_tokens=evaluation.max_response_len or params.max_tokens,
        ),
    )  # fmt: skip


def sampling_params(config: RlConfig, tokenizer: Tokenizer) -> SamplingParams:
    """How training responses are drawn. Raises ValueError when nothing but the length ends one."""
    ends = tuple(config.rollout.stop_token_ids)
    ends += () if tokenizer.eos is None else (tokenizer.eos,)
    if not ends:
        raise ValueError(
            f"{tokenizer.identity()['type']} has no end-of-sequence token: set rollout.stop_token_ids"
        )
    rollout = config.rollout
    return SamplingParams(
        n=rollout.n_samples_per_prompt, temperature=rollout.temperature, top_k=rollout.top_k,
        top_p=rollout.top_p, max_tokens=rollout.max_response_len, stop_token_ids=ends,
        seed=config.training.seed,
    )  # fmt: skip


def _reward_names(config: RlConfig, sets: list[PromptSet]) -> set[str]:
    return {
        choose_reward(config.rewards, own=record.reward, data_source=record.data_source)
        for prompts in sets
        for record in prompts.records
    }
