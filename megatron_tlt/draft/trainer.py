"""Trains a drafter on what the engine captured: one optimizer step a call, no target forward, no collective.

The teacher's token distribution is recomputed from the captured final states through the target's own
head, so a batch carries states only. Loss as in EAGLE (SmoothL1 on states, soft cross entropy on tokens),
or for EAGLE-3 the cross entropy alone over the draft vocabulary; with several passes weighted by
`pass_decay`^j (HASS, EAGLE-3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_tlt.draft.batch import DraftBatch
from megatron_tlt.models.drafter import Drafter
from megatron_tlt.ops.draft_losses import (
    accept_rates,
    acceptance_loss,
    feature_loss,
    masked_mean,
    overlap,
    soft_cross_entropy,
)


@dataclass(kw_only=True, slots=True)
class DrafterTrainerConfig:
    """Settings of `DrafterTrainer`."""

    lr: float = 1e-4
    """Learning rate after warm-up; 1e-3 for a drafter that starts from nothing."""
    lr_warmup_iters: int = 20
    """Steps over which the rate rises from 0."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """Largest gradient norm."""
    num_passes: int = 3
    """Training-time-test passes: 1 is EAGLE, 2 and more HASS, 7 EAGLE-3's setting."""
    pass_decay: float = 0.8
    """Weight of pass j is pass_decay^j."""
    feature_weight: float = 1.0
    """Weight of the state loss (EAGLE-1/2)."""
    token_weight: float = 0.1
    """Weight of the soft cross entropy (EAGLE-1/2; EAGLE-3 has no other loss)."""
    acceptance_weight: float = 0.0
    """Weight of the chance that a sampled draft is rejected (for verification by p/q rejection)."""
    rejection_weight: float = 0.0
    """Rows weigh 1 plus this times the chance that a draft there is rejected now."""
    feature_noise: float = 0.0
    """Half-width of uniform noise on the input features."""
    seed: int = 0
    """Seed of the noise."""

    def __post_init__(self) -> None:
        if self.num_passes < 1 or self.lr <= 0 or self.clip_grad <= 0 or self.lr_warmup_iters < 0:
            raise ValueError(
                f"num_passes={self.num_passes}, lr={self.lr}, clip_grad={self.clip_grad}, "
                f"lr_warmup_iters={self.lr_warmup_iters}: need num_passes >= 1, lr > 0, clip_grad > 0, "
                "lr_warmup_iters >= 0"
            )


class DrafterTrainer:
    """AdamW on a drafter that has its target's tables (`Drafter.share`).

    Example: trainer = DrafterTrainer(drafter, DrafterTrainerConfig()); trainer.step(collate(samples)).
    """

    def __init__(self, model: Drafter, config: DrafterTrainerConfig) -> None:
        if model.head is None:
            raise ValueError("the drafter has no target tables: call share(embedding, head) first")
        self.model, self.config, self.iteration = model, config, 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )
        for parameter in model.parameters():  # as AdamW does at its first step
            self.optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.generator = torch.Generator().manual_seed(config.seed)

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and Adam's moments, always in the same order."""
        parameters = list(self.model.parameters())
        states = [self.optimizer.state[parameter] for parameter in parameters]
        moments = [state[name] for name in ("exp_avg", "exp_avg_sq") for state in states]
        return [*parameters, *moments]

    def set_iteration(self, iteration: int) -> None:
        """Go on as after so many steps."""
        self.iteration = iteration
        for state in self.optimizer.state.values():
            state["step"].fill_(iteration)

    def step(self, batch: DraftBatch) -> dict[str, float]:
        """One update. Returns loss, its parts of the first pass, gradient norm, rate and accept length."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr()
        self.optimizer.zero_grad(set_to_none=True)
        loss, metrics = self._loss(batch, passes=self.config.num_passes)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        self.optimizer.step()
        self.iteration += 1
        return metrics | {"loss": float(loss.detach()), "grad_norm": float(norm), "lr": self._lr()}

    @torch.no_grad()
    def evaluate(self, batch: DraftBatch, *, num_steps: int) -> dict[str, float]:
        """Loss, and what a chain of `num_steps` drafts would bring on these very tokens."""
        loss, metrics = self._loss(batch, passes=num_steps)
        return metrics | {"loss": float(loss)}

    def _lr(self) -> float:
        warmup = self.config.lr_warmup_iters
        return self.config.lr * min(1.0, (self.iteration + 1) / warmup if warmup else 1.0)

    def _loss(
        self, batch: DraftBatch, *, passes: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        features = batch.features.to(self.model.fc.weight.dtype)
        if self.config.feature_noise and torch.is_grad_enabled():
            noise = torch.rand(features.shape, generator=self.generator).to(features)
            features = features + (2 * noise - 1) * self.config.feature_noise
        outputs = self.model.passes(batch.tokens, features, count=passes, rows=batch.rows)
        wanted, following, lessons = batch.last_hidden[:, 1:], batch.tokens[:, 1:], batch.lessons()
        with torch.no_grad():
            teacher = self.model.target_logits(wanted)
        total, metrics, hits = features.new_zeros(()), {}, []
        for j, output in enumerate(outputs):
            mask = lessons & (batch.positions[:, :-1] >= j)
            logits = self.model.logits(output[:, :-1])
            guess = self.model.target_tokens(logits.detach().argmax(-1))
            hits.append(guess == following)
            part = self._one_pass(output[:, :-1], logits, wanted, teacher, self._weights(batch, mask))
            if j == 0:
                metrics = {name: float(value.detach()) for name, value in part.items() if name != "sum"}
                metrics["accuracy"] = float(masked_mean(hits[0].float(), lessons))
            total = total + self.config.pass_decay**j * part["sum"]
        metrics["accept_length"] = 1.0 + float(accept_rates(hits, lessons).sum())
        return total, metrics

    @staticmethod
    def _weights(batch: DraftBatch, mask: torch.Tensor) -> torch.Tensor:
        return mask if batch.weights is None else mask * batch.weights[:, :-1]

    def _one_pass(
        self, output: torch.Tensor, logits: torch.Tensor, wanted: torch.Tensor,
        teacher: torch.Tensor, mask: torch.Tensor,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Losses of one pass; EAGLE-3 leaves out rows whose likeliest token it cannot say."""
        config, eagle3 = self.config, self.model.config.layout == "eagle3"
        if eagle3:
            mask = mask * self.model.t2d[teacher.argmax(-1)]
            teacher = teacher[..., self.model.t2d]
        if config.rejection_weight:
            rejected = 1 - overlap(logits.detach(), teacher)
            mask = mask * (1 + config.rejection_weight * rejected)
        token = soft_cross_entropy(logits, teacher, mask)
        part = {"token_loss": token, "sum": token if eagle3 else config.token_weight * token}
        if not eagle3:
            part["feature_loss"] = feature_loss(output, wanted, mask)
            part["sum"] = part["sum"] + config.feature_weight * part["feature_loss"]
        if config.acceptance_weight:
            part["acceptance_loss"] = acceptance_loss(logits, teacher, mask)
            part["sum"] = part["sum"] + config.acceptance_weight * part["acceptance_loss"]
        return part

    def state_dict(self) -> dict[str, Any]:
        """Drafter, optimizer, iteration and noise: what a resumed run needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["iteration"]
        self.generator.set_state(state["generator"])
