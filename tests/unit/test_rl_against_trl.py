"""Advantages, loss and gradient against TRL's GRPOTrainer on the same model, rollouts and rewards.

TRL is no dependency of the project: install it beside (`pip install trl`) to run these tests.
"""

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from megatron_tlt.ops.packing import build_micro_batch
from megatron_tlt.ops.policy_loss import GlobalCounts
from megatron_tlt.rl.algorithms import (
    AlgorithmConfig,
    sequence_advantages_of,
    shape_rewards,
    token_advantages_of,
)
from megatron_tlt.rl.policy_loss import PolicyTokens, policy_loss

GROUP, LONGEST, VOCAB = 4, 12, 20
REWARDS = [1.0, 0.0, 0.25, 0.5, 2.0, 2.0, 2.0, 2.0]  # the second group is flat


def make_trainer(folder, **settings):
    words = {f"w{i}": i for i in range(VOCAB - 2)} | {"<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, initializer_range=0.5, eos_token_id=VOCAB - 1, pad_token_id=VOCAB - 2,
        )
    )  # fmt: skip
    model.save_pretrained(folder)  # TRL loads the reference from where the policy came from
    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, report_to=[], num_generations=GROUP, bf16=False,
        per_device_train_batch_size=len(REWARDS), max_completion_length=LONGEST, temperature=1.0,
        epsilon=0.2, disable_dropout=True, gradient_checkpointing=False,
        **{"use_bias_correction_kl": False} | settings,
    )  # fmt: skip
    return GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: REWARDS,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}, {"prompt": "w4 w5"}]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
    )


def rollouts_of_trl(trainer):
    """TRL's own batch: generated ids, advantages, reference log-probs; old log-probs that are off-policy."""
    prompts = [{"prompt": "w1 w2 w3"}] * GROUP + [{"prompt": "w4 w5"}] * GROUP
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = trainer._generate_and_score_completions(prompts)
    mask = batch["completion_mask"]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
        seen = torch.cat((batch["prompt_mask"], mask), 1)
        now, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, seen, mask.size(1))
    noise = [0.4 * torch.randn(now.shape, generator=generator) for _ in range(2)]
    batch["old_per_token_logps"] = now + noise[0]
    if "ref_per_token_logps" in batch:
        batch["ref_per_token_logps"] = now + noise[1]
    return batch


def gradient_of(model):
    found = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def cut(values, mask):
    return [row[keep.bool()].detach() for row, keep in zip(values, mask, strict=True)]


def our_loss(config, trainer, batch):
    """Loss by this project's functions, with all sequences packed in rows of their own."""
    prompts = [ids.tolist() for ids in cut(batch["prompt_ids"], batch["prompt_mask"])]
    mask = batch["completion_mask"]
    responses = [ids.tolist() for ids in cut(batch["completion_ids"], mask)]
    lengths = torch.tensor([len(r) for r in responses])
    shaped = shape_rewards(
        config,
        torch.tensor(REWARDS),
        lengths,
        torch.zeros(len(REWARDS), dtype=torch.bool),
        max_length=LONGEST,
    )
    groups = torch.arange(len(REWARDS)) // GROUP
    advantages = sequence_advantages_of(config, shaped, groups)
    by_token = token_advantages_of(config, advantages, shaped.counted, lengths)
    rows = build_micro_batch(prompts, responses, range(len(responses)), packed=False)
    log_p = trainer.model(input_ids=rows.tokens).logits.float().log_softmax(-1)
    place = {
        name: rows.scatter(cut(batch[key], mask)) if key in batch else None
        for name, key in (
            ("old_log_probs", "old_per_token_logps"),
            ("ref_log_probs", "ref_per_token_logps"),
        )
    }
    tokens = PolicyTokens(
        log_probs=log_p.gather(-1, rows.labels[..., None]).squeeze(-1),
        entropy=-(log_p.exp() * log_p).sum(-1),
        advantages=rows.scatter(list(by_token.split(lengths.tolist()))),
        mask=rows.response_mask,
        segments=rows.segments,
        **place,
    )
    counts = GlobalCounts(
        num_tokens=float(lengths.sum()), num_sequences=len(responses), max_length=LONGEST
    )
    loss, metrics = policy_loss(config, tokens, counts)
    return advantages, loss, metrics


CASES = {
    # our settings -> TRL's
    "grpo": ({"kl_loss_coef": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
    "grpo_with_unbiased_kl": (
        {"kl_loss_coef": 0.1, "use_unbiased_kl": True},
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "token_mean_with_kl": (
        {"loss_agg_mode": "token_mean", "kl_loss_coef": 0.1},
        {"loss_type": "dapo", "beta": 0.1},
    ),
    "grpo_without_kl": ({"kl_loss_coef": 0.0}, {"loss_type": "grpo", "beta": 0.0}),
    "dr_grpo": (
        {"algorithm": "dr_grpo", "kl_loss_coef": 0.1},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.1},
    ),
    "dapo": (
        {"algorithm": "dapo", "truncation": "penalise"},
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0},
    ),
    "gspo": (
        {"algorithm": "gspo"},
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0,
            "epsilon": 3e-4, "epsilon_high": 4e-4,
        },
    ),
    "dual_clip": (
        {"eps_clip_c": 1.3, "kl_loss_coef": 0.0},
        {"loss_type": "grpo", "delta": 1.3, "beta": 0.0},
    ),
    "entropy_bonus": (
        {"loss_agg_mode": "token_mean", "kl_loss_coef": 0.0, "entropy_coef": 0.05},
        {"loss_type": "dapo", "beta": 0.0, "entropy_coef": 0.05},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_advantages_loss_and_gradient_are_those_of_trl(name, tmp_path):
    ours, theirs = CASES[name]
    settings = {"epsilon": 0.2} | theirs
    epsilon = settings.pop("epsilon")
    trainer = make_trainer(tmp_path, **settings)
    trainer.epsilon_low = epsilon
    batch = rollouts_of_trl(trainer)
    config = AlgorithmConfig(advantage_epsilon=1e-4, **ours)  # TRL's epsilon

    theirs_loss = trainer._compute_loss(trainer.model, batch)
    theirs_loss.backward()
    expected = gradient_of(trainer.model)
    advantages, loss, metrics = our_loss(config, trainer, batch)
    loss.backward()
    found = gradient_of(trainer.model)

    assert torch.allclose(advantages, batch["advantages"], atol=1e-6)
    assert advantages[GROUP:].tolist() == [0.0] * GROUP
    assert float(loss.detach()) == pytest.approx(float(theirs_loss.detach()), rel=1e-5, abs=1e-6)
    assert float(expected.norm()) > 1e-3
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    if config.loss_agg_mode == "token_mean" and config.kl_loss_coef > 0:
        [kl] = trainer._metrics["train"]["kl"]
        assert float(metrics["kl_loss"]) == pytest.approx(kl, rel=1e-5)
