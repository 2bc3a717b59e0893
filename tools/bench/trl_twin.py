"""TRL's GRPOTrainer on the same model, prompts, reward and sizes: one process of the RL benchmark.

Runs in an environment of its own (`pip install trl`); reads a JSON of settings, prints a JSON of step times.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_tlt.data.countdown import countdown_reward


class TimedTrainer(GRPOTrainer):
    """Adds up the seconds of generation and rewards, and counts completion tokens."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.spent = {"generate": 0.0, "reward": 0.0}
        self.tokens: list[int] = []

    def _generate_single_turn(self, *args, **options):
        began = time.perf_counter()
        result = super()._generate_single_turn(*args, **options)
        self.spent["generate"] += time.perf_counter() - began
        return result

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        began = time.perf_counter()
        result = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.spent["reward"] += time.perf_counter() - began
        self.tokens += [len(ids) for ids in completion_ids_list]
        return result


class Steps(TrainerCallback):
    """Writes down each optimizer step."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.trainer: TimedTrainer | None = None

    def on_step_begin(self, *_, **__) -> None:
        self.trainer.spent = dict.fromkeys(self.trainer.spent, 0.0)
        self.trainer.tokens = []
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        total, spent, tokens = time.perf_counter() - self.began, self.trainer.spent, self.trainer.tokens
        self.rows.append(
            {
                "step_s": total,
                "generate_s": spent["generate"],
                "reward_s": spent["reward"],
                "train_s": total - sum(spent.values()),
                "response_tokens": sum(tokens),
                "longest": max(tokens),
            }
        )


def reward(prompts, completions, label, **_) -> list[float]:
    return [countdown_reward("", text, facts, {}) for text, facts in zip(completions, label)]


def main(settings: dict) -> None:
    torch.set_num_threads(settings["threads"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=settings["tokenizer"], eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        padding_side="left",
    )  # fmt: skip
    lines = Path(settings["prompts"]).read_text().splitlines()
    rows = [{k: row[k] for k in ("prompt", "label")} for row in map(json.loads, lines)]
    samples = settings["num_prompts"] * settings["group"]
    config = GRPOConfig(
        output_dir=settings["folder"], use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=min(samples, settings["trl_micro_batch"]),
        gradient_accumulation_steps=max(1, samples // settings["trl_micro_batch"]),
        num_generations=settings["group"], max_completion_length=settings["max_tokens"],
        temperature=1.0, beta=0.0, epsilon=0.2, loss_type="grpo", learning_rate=settings["lr"],
        lr_scheduler_type="constant", max_steps=settings["steps"], save_strategy="no",
        gradient_checkpointing=False, logging_strategy="no", seed=settings["seed"],
    )  # fmt: skip
    steps = Steps()
    trainer = TimedTrainer(
        model=LlamaForCausalLM.from_pretrained(settings["model"]),
        reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[steps],
    )  # fmt: skip
    steps.trainer = trainer
    trainer.train()
    print("RESULT " + json.dumps(steps.rows))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
