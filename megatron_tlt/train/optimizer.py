"""Optimizer, learning-rate schedule and data-parallel wrapping from one configuration."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from megatron_tlt import mcore
from megatron_tlt.parallel import Parallel

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module, MegatronModule


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, its schedule and the data-parallel reduction (Megatron's spelling)."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float | None = None
    """Final learning rate; default a tenth of lr, or lr itself for the constant schedule."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: int | None = None
    """Iterations until min_lr; default training.train_iters."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up from lr_warmup_init."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of lr_decay_iters, instead of lr_warmup_iters."""
    lr_warmup_init: float = 0.0
    """Learning rate at iteration 0 of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last part of the WSD schedule."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the last part of the WSD schedule; required by it."""
    weight_decay: float = 0.1
    """Decoupled weight decay; norms and biases have none."""
    start_weight_decay: float | None = None
    """Weight decay at the start, when it rises; default weight_decay."""
    end_weight_decay: float | None = None
    """Weight decay at the end, when it rises; default weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = False
    """Start the gradient reduction of a bucket as soon as its gradients are ready."""
    overlap_param_gather: bool = False
    """Overlap the parameter all-gather with the forward pass; needs use_distributed_optimizer."""
    ddp_bucket_size: int | None = None
    """Parameters per reduction bucket; default megatron-core's max(40M, 1M x DP)."""

    def __post_init__(self) -> None:
        if self.min_lr is None:
            self.min_lr = self.lr if self.lr_decay_style == "constant" else self.lr / 10
        for name in ("start_weight_decay", "end_weight_decay"):
            if getattr(self, name) is None:
                setattr(self, name, self.weight_decay)
        self._check()

    def _check(self) -> None:
        self._check_ranges()
        if not 0.0 <= self.min_lr <= self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr} must be in [0, lr={self.lr}]")
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise ValueError(
                f"optimizer.lr_warmup_fraction={self.lr_warmup_fraction} and lr_warmup_iters="
                f"{self.lr_warmup_iters} exclude each other: give one"
            )
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            raise ValueError("optimizer.lr_decay_style=WSD needs optimizer.lr_wsd_decay_iters")
        if not 0 <= self.start_weight_decay <= self.end_weight_decay:
            raise ValueError(
                f"optimizer.start_weight_decay={self.start_weight_decay} must be in "
                f"[0, end_weight_decay={self.end_weight_decay}]"
            )
        if self.weight_decay_incr_style == "constant" and (
            self.start_weight_decay != self.end_weight_decay
        ):
            raise ValueError("weight_decay_incr_style=constant needs equal start and end_weight_decay")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError("optimizer.overlap_param_gather needs use_distributed_optimizer=true")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("optimizer.overlap_param_gather needs overlap_grad_reduce=true")

    def _check_ranges(self) -> None:
        for name in ("lr", "lr_warmup_init", "lr_warmup_iters", "clip_grad", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be a number, at least 0")
        for name in ("adam_beta1", "adam_beta2", "lr_warmup_fraction"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"optimizer.{name}={value} must be in [0, 1)")
        for name in ("lr_decay_iters", "lr_wsd_decay_iters", "ddp_bucket_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"optimizer.{name}={value} must be at least 1")
        if not self.adam_eps > 0:
            raise ValueError(f"optimizer.adam_eps={self.adam_eps} must be above 0")

    def schedule_iters(self, train_iters: int) -> tuple[int, int]:
        """(decay, warm-up) iterations. Raises ValueError when the warm-up does not fit."""
        decay = self.lr_decay_iters or train_iters
        warmup = self.lr_warmup_iters
        if self.lr_warmup_fraction is not None:
            warmup = int(self.lr_warmup_fraction * decay)
        if warmup >= decay:
            raise ValueError(
                f"warm-up of {warmup} iterations must be shorter than the decay of {decay}: "
                "lower optimizer.lr_warmup_iters or raise lr_decay_iters / training.train_iters"
            )
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters > decay - warmup:
            raise ValueError(
                f"optimizer.lr_wsd_decay_iters={self.lr_wsd_decay_iters} exceeds the {decay - warmup} "
                f"iterations after the warm-up"
            )
        return decay, warmup


def wrap_data_parallel(
    chunks: list[MegatronModule], config: OptimizerConfig, parallel: Parallel
) -> list[DistributedDataParallel]:
    """Put each chunk into megatron-core's DDP (contiguous fp32 gradient buffers), in bf16 through
    Float16Module, and give the schedule its hooks."""
    mcore_config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        use_distributed_optimizer=config.use_distributed_optimizer,
        bucket_size=config.ddp_bucket_size,
        fp8_param_gather=bool(mcore_config.fp8_param),
    )
    if mcore_config.bf16:
        chunks = [Float16Module(mcore_config, chunk) for chunk in chunks]
    wrapped = [
        DistributedDataParallel(
            config=mcore_config,
            ddp_config=ddp_config,
            module=chunk,
            # With one bucket per later chunk the interleaved schedule has nothing left to overlap.
            disable_bucketing=number > 0,
            pg_collection=parallel.groups,
        )
        for number, chunk in enumerate(chunks)
    ]
    one_or_list = (lambda items: items[0] if len(items) == 1 else items)  # fmt: skip
    if config.overlap_grad_reduce:
        mcore_config.no_sync_func = one_or_list([chunk.no_sync for chunk in wrapped])
        if parallel.config.num_model_chunks > 1:
            mcore_config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    if config.overlap_param_gather and parallel.config.num_model_chunks > 1:
        mcore_config.param_sync_func = [chunk.start_param_sync for chunk in wrapped]
    return wrapped


@contextmanager
def gathered_parameters(chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """Inside, every rank holds the parameters of the last update in full, and no hook gathers them.

    With overlap_param_gather they arrive during the next forward pass: evaluating or saving before that
    would use old values of what other ranks updated.
    """
    overlapped = [chunk for chunk in chunks if chunk.ddp_config.overlap_param_gather]
    config = chunks[0].config
    sync_func, config.param_sync_func = config.param_sync_func, None
    for chunk in overlapped:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()
        config.param_sync_func = sync_func


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, parallel: Parallel
) -> MegatronOptimizer:
    """AdamW over this rank's parameters: Apex/TE FusedAdam where present, else torch's fused AdamW."""
    bf16 = chunks[0].config.bf16
    mcore_config = McoreOptimizerConfig(
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(
        mcore_config,
        chunks,
        config_overrides=get_standard_config_overrides(mcore_config),
        use_gloo_process_groups=False,  # only its unsharded checkpoint formats need them
    )
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            for group in inner.param_groups:
                group["fused"] = True  # one pass over memory instead of a dozen
            mcore.ensure_adam_state(inner)
    return optimizer


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside megatron-core's wrappers; none on a rank without parameters."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def build_scheduler(
    optimizer: MegatronOptimizer,
    config: OptimizerConfig,
    *,
    train_iters: int,
    samples_after: Callable[[int], int],
) -> OptimizerParamScheduler:
    """Learning rate and weight decay over consumed samples, as Megatron counts them.

    `samples_after(n)` is the number of samples in the first n iterations: n times the global batch size,
    or less during a ramp-up, so that warm-up and decay end at the iterations that the configuration says.
    """
    decay, warmup = config.schedule_iters(train_iters)
    wsd = config.lr_wsd_decay_iters
    decay_samples = samples_after(decay)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=samples_after(warmup),
        lr_decay_steps=decay_samples,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.start_weight_decay,
        end_wd=config.end_weight_decay,
        wd_incr_steps=samples_after(train_iters),
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=None if wsd is None else decay_samples - samples_after(decay - wsd),
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
