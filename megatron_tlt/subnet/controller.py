"""The subnets of a run: what the training loop holds.

    subnets = EstSubnets(schedule, parallel)       # after build_schedule, before building the model
    chunks = build_chunks(..., layer_spec=est_layer_spec)
    subnets.attach(data_parallel_chunks, optimizer)
    each step:   subnets.begin_step(iteration); train_step(...); subnets.end_step(StepOutcome(...))
    evaluation:  with subnets.full_model(): ...

`iteration` is the number of finished steps. The plan stays from `begin_step` to the next one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatron_tlt import device
from megatron_tlt.parallel import Parallel
from megatron_tlt.subnet.adaptive import AdaptiveGrower
from megatron_tlt.subnet.coverage import Coverage
from megatron_tlt.subnet.draw import HASH_VERSION, Plan, PlanKey, draw_plan, plan_key
from megatron_tlt.subnet.flops import FlopsMeter, plan_flops
from megatron_tlt.subnet.frozen import IdleFreezer, OwnedParameter
from megatron_tlt.subnet.micro_batch import micro_batch_size
from megatron_tlt.subnet.modules import SkipCalls, SubnetTransformerLayer
from megatron_tlt.subnet.schedule import Schedule
from megatron_tlt.subnet.spec import est_layer_spec
from megatron_tlt.subnet.stats import RunStats, StepOutcome
from megatron_tlt.subnet.te_modules import est_te_layer_spec

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer


class EstSubnets:
    """Sets the plan of every step on this rank's layers, and keeps the numbers of the run."""

    layer_spec = staticmethod(est_layer_spec)
    te_layer_spec = staticmethod(est_te_layer_spec)
    """What the model is built of."""

    def __init__(self, schedule: Schedule, parallel: Parallel) -> None:
        """Raises ValueError when this layout would give ranks unequal work."""
        config = parallel.config
        schedule.check_layout(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            virtual=config.num_model_chunks,
        )
        self._base = self.schedule = schedule
        self.plan: Plan | None = None
        self.meter = FlopsMeter(schedule=schedule)
        self.coverage = Coverage(pools=schedule.pools, num_layers=schedule.shape.num_layers)
        self.stats = RunStats()
        options = schedule.options
        self._grower = AdaptiveGrower(
            window=options.adaptive_window,
            min_gain=options.adaptive_min_gain,
            drop_ratio=options.adaptive_drop_ratio,
            num_stages=len(schedule.stages) if options.schedule == "adaptive" else 1,
        )
        self._layers: list[SubnetTransformerLayer] = []
        self._freezer: IdleFreezer | None = None
        self._key: PlanKey | None = None
        self._iteration = 0
        self.flops_per_token = 0.0
        """Of the step that `begin_step` began: forward and backward, all ranks, head included."""

    def attach(
        self, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer | None = None
    ) -> None:
        """Take the layers of the model's chunks, wrapped by megatron's data parallelism or bare.

        `optimizer` is needed for `idle_params: frozen`. Raises ValueError for a model without subnet layers.
        """
        self._layers = []
        for chunk in chunks:
            layers = [m for m in chunk.modules() if isinstance(m, SubnetTransformerLayer)]
            if not layers:
                raise ValueError(
                    "the model has no subnet layers: build it with layer_spec=est_layer_spec"
                )
            if isinstance(chunk, DistributedDataParallel):
                for layer in layers:
                    layer.skip_calls = _skip_calls(layer, chunk)
            self._layers += layers
        if self.schedule.options.idle_params == "frozen":
            if optimizer is None:
                raise ValueError("est.idle_params=frozen needs the optimizer: attach(chunks, optimizer)")
            self._freezer = IdleFreezer(list(_owned_parameters(optimizer)))

    def micro_batch_size(self, iteration: int, *, default: int) -> int:
        """Samples per forward pass of one rank in step `iteration`."""
        return micro_batch_size(self.schedule, self.schedule.stage_index(iteration), default=default)

    def begin_step(self, iteration: int) -> Plan:
        """Run the subnet of step `iteration` from now on. Every `digest_interval` steps all ranks check that
        they have the same one (a collective); raises RuntimeError when not."""
        key = plan_key(self.schedule, iteration)
        first = self.plan is None
        if key != self._key:
            self._key, self.plan = key, draw_plan(self.schedule, iteration)
            self.flops_per_token = plan_flops(self.schedule, self.plan).total
            self._apply()
        else:
            for layer in self._layers:
                layer.renew()
        self._iteration = iteration
        interval = self.schedule.options.digest_interval
        if first or (interval and iteration % interval == 0):
            check_agreement(self.plan, iteration)
        return self.plan

    def _apply(self) -> None:
        for layer in self._layers:
            layer.set_plan(self.plan.layers[layer.layer_number - 1], self.schedule.pools)
        if self._freezer is None:
            return
        skipped = [p for layer in self._layers if not layer.is_active for p in layer.parameters()]
        parts = {}
        for layer in self._layers:
            if layer.is_active:
                parts |= layer.cut_parameters()
        self._freezer.set_idle(skipped=skipped, parts=parts)

    def end_step(self, outcome: StepOutcome) -> bool:
        """Count the step that `begin_step` began; True when it was the last one of its stage.

        `outcome` must be the same on every rank, but for its seconds. A step without an update cost FLOPs
        and nothing else: it trained nothing, and its loss may not be a number.
        """
        assert self.plan is not None, "end_step without begin_step"
        work = self.meter.add(self.plan, tokens=outcome.tokens)
        if outcome.updated:
            self.coverage.add(self.plan)
            self.stats.add(self.plan.stage, outcome, flops=work.total)
            self._grow(outcome.loss)
        return self.schedule.stage_index(self._iteration + 1) != self.plan.stage

    def _grow(self, loss: float) -> None:
        """Adaptive: let the loss of the step decide whether the next one begins a stage."""
        end = self.schedule.stages[self._grower.stage].end
        if self._grower.observe(loss, next_step=self._iteration + 1, latest_end=end):
            self.schedule = self._base.with_growth_at(self._grower.grown_at)

    @contextmanager
    def full_model(self) -> Iterator[None]:
        """Inside, the whole model runs, unscaled: evaluation and everything that is not a training step."""
        for layer in self._layers:
            layer.set_full()
        try:
            yield
        finally:
            if self.plan is not None:
                self._apply()

    def metrics(self) -> dict[str, float]:
        """Numbers of the step that `begin_step` began and of the run so far, for the log."""
        assert self.plan is not None, "no step has begun"
        stage, saving = self.schedule.stages[self.plan.stage], self.meter.saving()
        active = [layer for layer in self.plan.layers if layer is not None]
        heads, mlp = self.schedule.pools.heads.total, self.schedule.pools.mlp.total
        return {
            "est-stage": self.plan.stage,
            "est-stage-end": self.schedule.train_iters if stage.end is None else stage.end,
            "est-layers": len(active) / len(self.plan.layers),
            "est-heads": _mean([1.0 if x.heads is None else len(x.heads) / heads for x in active]),
            "est-mlp": _mean([1.0 if x.mlp is None else len(x.mlp) / mlp for x in active]),
            "est-flops": self.meter.total,
            "est-dense-flops": self.meter.dense_total,
            "est-saving-layers": saving.layers,
            "est-saving-total": saving.total,
            "est-touched-heads": self.coverage.summary("heads").touched,
            "est-touched-mlp": self.coverage.summary("mlp").touched,
        } | self.stats.metrics(self.plan.stage)

    def stage_rows(self) -> list[dict[str, float]]:
        """What the stages so far did, one row each; see `RunStats.rows`."""
        return self.stats.rows(self.schedule)

    def state_dict(self) -> dict[str, object]:
        """Plain values for a checkpoint. The plans themselves need none: they follow from the step."""
        return {
            "hash_version": HASH_VERSION,
            "schedule": self._base.identity(),
            "grower": self._grower.state_dict(),
            "meter": self.meter.state_dict(),
            "coverage": self.coverage.state_dict(),
            "stats": self.stats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on where `state` was taken. Raises ValueError when it was another schedule's, or none's (empty:
        a dense run)."""
        if not state:
            raise ValueError(
                f"the checkpoint was trained without subnets, this run has est.schedule="
                f"{self._base.options.schedule}: set est.schedule=dense, or start with checkpoint.finetune"
            )
        ours = {"hash_version": HASH_VERSION} | self._base.identity()
        theirs = {"hash_version": state["hash_version"]} | state["schedule"]
        different = [name for name in ours if ours[name] != theirs.get(name)]
        if different:
            raise ValueError(
                "the checkpoint was trained on other subnets: "
                + "; ".join(f"{n} was {theirs.get(n)!r}, is {ours[n]!r}" for n in different)
                + "; give the run's est options as they were (ends in steps or tokens where train_iters "
                "changes), or start with checkpoint.finetune"
            )
        self._grower.load_state_dict(state["grower"])
        self.meter.load_state_dict(state["meter"])
        self.coverage.load_state_dict(state["coverage"])
        self.stats.load_state_dict(state["stats"])
        self.schedule = self._base.with_growth_at(self._grower.grown_at)
        self._key = None


def check_agreement(plan: Plan, iteration: int) -> None:
    """All ranks of the world must train the same subnet; a collective. Raises RuntimeError when not."""
    digest = plan.digest()
    ends = torch.tensor([digest, -digest], dtype=torch.int64, device=device.device())
    dist.all_reduce(ends, op=dist.ReduceOp.MIN)
    smallest, largest = ends[0].item(), -ends[1].item()
    if smallest != largest:
        raise RuntimeError(
            f"iteration {iteration}: ranks train different subnets (digests from {smallest:#x} to "
            f"{largest:#x}, here {digest:#x}); seed and est options must be the same on all of them"
        )


def _skip_calls(layer: SubnetTransformerLayer, chunk: DistributedDataParallel) -> SkipCalls:
    """What megatron's hooks do for a layer that runs, for one that does not."""
    params = [param for param in layer.parameters() if param in chunk.param_to_bucket_group]
    overlapped = chunk.ddp_config.overlap_grad_reduce
    return SkipCalls(
        before=partial(_finish_param_sync, chunk, params),
        after=partial(_register_ready, chunk, params[::-1]) if overlapped else None,
    )


def _finish_param_sync(chunk: DistributedDataParallel, params: list[torch.nn.Parameter]) -> None:
    """Wait for the all-gather of these parameters and start the next one, as the forward hooks do."""
    if not chunk.use_forward_hook or not chunk.remove_forward_pre_hook_handles:
        return
    skip_next = (
        chunk.ddp_config.align_param_gather or chunk.overlap_param_gather_with_optimizer_step
    )
    for group in dict.fromkeys(chunk.param_to_bucket_group[param] for param in params):
        group.finish_param_sync(skip_next_bucket_dispatch=skip_next)


def _register_ready(chunk: DistributedDataParallel, params: list[torch.nn.Parameter]) -> None:
    """Their gradients are zero, and final: a bucket that waits for them may be reduced."""
    for param in params:
        chunk.param_to_bucket_group[param].register_grad_ready(param, chunk.force_all_reduce)


def _owned_parameters(optimizer: MegatronOptimizer) -> Iterator[OwnedParameter]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if inner is None:
            continue
        if isinstance(part, DistributedOptimizer):
            for model, (group, order) in part.model_param_group_index_map.items():
                owned = part._get_model_param_range_map(model)["param"]
                yield OwnedParameter(
                    model=model, main=inner.param_groups[group]["params"][order], optimizer=inner,
                    start=owned.start, end=owned.end,
                )  # fmt: skip
            continue
        for model, main in _whole_parameters(part):
            yield OwnedParameter(
                model=model, main=main, optimizer=inner, start=0, end=model.numel()
            )


def _whole_parameters(
    part: MegatronOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    if isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            yield from ((param, param) for param in group["params"])
        return
    model = part.float16_groups + part.fp32_from_fp32_groups
    main = part.fp32_from_float16_groups + part.fp32_from_fp32_groups
    for model_group, main_group in zip(model, main, strict=True):
        yield from zip(model_group, main_group, strict=True)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
