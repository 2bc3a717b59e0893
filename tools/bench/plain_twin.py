"""The same model and training step in plain PyTorch, as one would write it without Megatron.

nn.Linear, scaled_dot_product_attention, F.cross_entropy, AdamW(fused=True), clipping with foreach. In bf16
it does what Megatron does: bf16 parameters compute, fp32 master weights are updated and copied back, and
the bf16 gradients of each micro-batch are added to fp32 sums. Where the CPU has no bf16 GEMM (torch then
runs a scalar loop, up to a hundred times slower) `matmul_dtype=float32` casts the operands and rounds the
result, which has the same numerics; it is what the comparison uses there.

Imports torch only, so that a process of its own shows the memory of plain PyTorch.
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One model of the benchmark and its batch."""

    name: str
    llama: bool
    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int = 8192
    seq: int = 128
    micro_batch: int = 2
    microbatches: int = 2


def shapes(*, toy: bool) -> dict[str, Shape]:
    """GPT-2 and Llama shapes of about 5M, 15M and 50M parameters, or one toy of each."""
    if toy:
        common = dict(layers=2, hidden=64, heads=4, vocab=512, seq=32)
        made = [
            Shape(name="gpt2-toy", llama=False, groups=4, ffn=256, **common),
            Shape(name="llama-toy", llama=True, groups=2, ffn=192, **common),
        ]
    else:
        made = []
        for size, layers, hidden, heads in (("5M", 4, 256, 4), ("15M", 6, 384, 6), ("50M", 9, 640, 10)):
            batch = dict(micro_batch=4) if size == "5M" else {}
            common = dict(layers=layers, hidden=hidden, heads=heads, **batch)
            made.append(
                Shape(name=f"gpt2-{size}", llama=False, groups=heads, ffn=4 * hidden, **common)
            )
            ffn = 64 * round(8 * hidden / 3 / 64)
            made.append(
                Shape(name=f"llama-{size}", llama=True, groups=heads // 2, ffn=ffn, **common)
            )
    return {shape.name: shape for shape in made}


class Linear(nn.Linear):
    """nn.Linear whose GEMM may run in another dtype than its tensors'."""

    matmul_dtype: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.matmul_dtype
        if dtype is None or dtype == x.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n, self.g, self.d = shape.heads, shape.groups, shape.hidden // shape.heads
        self.qkv = Linear(shape.hidden, (self.n + 2 * self.g) * self.d, bias=not shape.llama)
        self.proj = Linear(shape.hidden, shape.hidden, bias=not shape.llama)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None):
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, self.n + 2 * self.g, self.d).transpose(1, 2)
        q, k, v = qkv.split((self.n, self.g, self.g), dim=1)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        dtype = q.dtype if self.qkv.matmul_dtype is None else self.qkv.matmul_dtype
        y = F.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True, enable_gqa=self.g != self.n
        )
        return self.proj(y.to(x.dtype).transpose(1, 2).reshape(b, s, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[b, n, s, d]`, halves paired as in Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.llama else nn.LayerNorm
        self.llama = shape.llama
        self.norm1, self.norm2 = norm(shape.hidden, eps=1e-5), norm(shape.hidden, eps=1e-5)
        self.attention = Attention(shape)
        self.fc1 = Linear(shape.hidden, (1 + shape.llama) * shape.ffn, bias=not shape.llama)
        self.fc2 = Linear(shape.ffn, shape.hidden, bias=not shape.llama)

    def forward(self, x: torch.Tensor, rope) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), rope)
        y = self.fc1(self.norm2(x))
        if self.llama:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y, approximate="tanh")
        return x + self.fc2(y)


class PlainGPT(nn.Module):
    """GPT-2 (tied head, learned positions) or Llama (rotary, untied head)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.llama else nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.llama else nn.LayerNorm)(shape.hidden, eps=1e-5)
        self.head = Linear(shape.hidden, shape.vocab, bias=False)
        if not shape.llama:
            self.head.weight = self.embed.weight
        self.rope = rope_table(shape) if shape.llama else None

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Tokens and labels `[b, s]` -> summed loss in nats."""
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        rope = None if self.rope is None else tuple(part.to(x.dtype) for part in self.rope)
        for block in self.blocks:
            x = block(x, rope)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def rope_table(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    d = shape.hidden // shape.heads
    frequencies = 1.0 / 10000 ** (torch.arange(0, d, 2).float() / d)
    angles = torch.outer(torch.arange(shape.seq).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class PlainTrainer:
    """Model, fp32 master weights where the model is bf16, AdamW; `step` is one optimizer step."""

    def __init__(
        self, model: PlainGPT, dtype: torch.dtype, matmul_dtype: torch.dtype | None = None
    ) -> None:
        self.masters = [p.detach().clone() for p in model.parameters()] if (
            dtype != torch.float32
        ) else list(model.parameters())  # fmt: skip
        self.model = model.to(dtype)
        for module in model.modules():
            if isinstance(module, Linear):
                module.matmul_dtype = matmul_dtype
        self.params, self.mixed = list(self.model.parameters()), dtype != torch.float32
        groups = [
            {"params": [p for p in self.masters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.masters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True
        )

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """One optimizer step over micro-batches; mean loss per token in nats."""
        self.optimizer.zero_grad(set_to_none=True)
        count = sum(batch["tokens"].numel() for batch in batches)
        total = 0.0
        for batch in batches:
            loss = self.model(batch["tokens"], batch["labels"]) / count
            loss.backward()
            total += loss.item()
            if self.mixed:
                self._add_to_masters()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        if self.mixed:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
        return total

    def _add_to_masters(self) -> None:
        grads = [p.grad.float() for p in self.params]
        if self.masters[0].grad is None:
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = grad
        else:
            torch._foreach_add_([m.grad for m in self.masters], grads)
        for param in self.params:
            param.grad = None


def random_batches(shape: Shape, step: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of step `step`: a learnable pattern, the same for both sides."""
    generator = torch.Generator().manual_seed(step)
    size = (shape.microbatches * shape.micro_batch, shape.seq + 1)
    data = torch.randint(0, shape.vocab // 8, size, generator=generator) * 7 % shape.vocab
    return [
        {"tokens": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()}
        for part in data.split(shape.micro_batch)
    ]


def draw(model: PlainGPT, layers: int) -> None:
    """GPT-2's initial weights, for a run of this side alone."""
    for name, param in model.named_parameters():
        if param.dim() > 1:
            deep = "proj" in name or "fc2" in name
            nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the plain twin alone; prints peak MiB.")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--matmul-dtype", choices=["float32", "bfloat16"], default=None)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = shapes(toy=args.toy)[args.shape]
    model = PlainGPT(shape)
    draw(model, shape.layers)
    matmul = None if args.matmul_dtype is None else getattr(torch, args.matmul_dtype)
    trainer = PlainTrainer(model, getattr(torch, args.dtype), matmul)
    for step in range(args.steps):
        trainer.step(random_batches(shape, step))
    with open("/proc/self/status", encoding="ascii") as lines:
        print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024)


if __name__ == "__main__":
    main()
