"""Training runs on GPUs as tasks: one process, or one a GPU through torchrun's environment."""

from megatron_tlt import device
from megatron_tlt.models.backend import local_layer_spec
from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.models.te import te_layer_spec
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.controller import EstSubnets
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from megatron_tlt.subnet.spec import est_layer_spec
from megatron_tlt.subnet.stats import StepOutcome
from megatron_tlt.subnet.te_modules import est_te_layer_spec
from megatron_tlt.train.optimizer import OptimizerConfig, build_optimizer, wrap_data_parallel
from megatron_tlt.train.step import attach_finalizer, train_step

import torch

VOCAB, SEQ, BATCH = 256, 128, 4
SHAPE = dict(preset="tiny-llama", num_layers=4, hidden_size=256, ffn_hidden_size=512, seq_length=SEQ,
             num_attention_heads=8, num_query_groups=4, kv_channels=64)  # fmt: skip
SPECS = {
    ("local", False): local_layer_spec, ("local", True): est_layer_spec,
    ("transformer_engine", False): te_layer_spec, ("transformer_engine", True): est_te_layer_spec,
}  # fmt: skip


def train(
    impl: str, precision: dict, *, steps: int = 20, layout: dict | None = None, est: dict | None = None
) -> list[float]:
    """The loss of every step of a bf16 run."""
    parallel = init_parallel(ParallelConfig(**(layout or {})), seed=1)
    model = ModelConfig(**SHAPE)
    fields = PrecisionConfig(transformer_impl=impl, **precision)
    fields.check_shapes(
        model, tensor_model_parallel_size=parallel.config.tensor_model_parallel_size,
        micro_batch_size=BATCH,
    )  # fmt: skip
    bare = build_chunks(
        model, parallel, vocab_size=VOCAB, params_dtype=torch.bfloat16, precision=fields,
        layer_spec=SPECS[impl, est is not None],
    )  # fmt: skip
    initialize_parameters(bare, seed=1, vocab_size=VOCAB)
    config = OptimizerConfig(lr=1e-3)
    chunks = wrap_data_parallel(bare, config, parallel)
    attach_finalizer(chunks, parallel)
    optimizer = build_optimizer(chunks, config, parallel)
    subnets = None
    if est is not None:
        schedule = build_schedule(
            EstConfig(**est), ModelShape.of(model, padded_vocab_size=VOCAB), train_iters=steps, seed=7,
            tokens_after=lambda n: n,
        )  # fmt: skip
        subnets = EstSubnets(schedule, parallel)
        subnets.attach(chunks, optimizer)
    losses = []
    for step in range(steps):
        if subnets is not None:
            subnets.begin_step(step)
        result = train_step(chunks, optimizer, batches(step), parallel=parallel)
        if subnets is not None:
            subnets.end_step(
                StepOutcome(loss=result.loss, grad_norm=result.grad_norm, clip_grad=1.0,
                            tokens=BATCH * SEQ, seconds=1.0)
            )  # fmt: skip
        losses.append(result.loss)
    return losses


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    """Two micro-batches, the same on every data-parallel rank."""
    data = torch.randint(0, VOCAB, (2, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
    data = (data % 7 * 3 + torch.arange(SEQ + 1) % 5).to(device.device())
    ones = torch.ones(BATCH, SEQ, device=device.device())
    positions = torch.arange(SEQ, device=device.device()).expand(BATCH, -1)
    return [
        {"tokens": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous(), "loss_mask": ones,
         "position_ids": positions}
        for x in data
    ]  # fmt: skip
