"""How often each unit has been trained: random draws leave some behind, nested ones leave many."""

from dataclasses import dataclass, field

from megatron_tlt.subnet.draw import LayerPlan, Plan
from megatron_tlt.subnet.shape import Pools


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverageSummary:
    """Example: 90 % of the units trained at least once; the mean unit in 0.6 of the steps."""

    touched: float
    """Share of units (of all layers) that at least one step trained."""
    mean: float
    """Mean share of the steps in which a unit was trained."""
    least: float
    """Share of the steps in which the least trained unit was trained."""


@dataclass(kw_only=True, slots=True)
class Coverage:
    """Counts, per layer, the steps that trained each head unit and each block of neurons."""

    pools: Pools
    num_layers: int
    steps: int = 0
    _full: int = 0
    _counts: dict[str, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counts = {
            name: [[0] * getattr(self.pools, name).total for _ in range(self.num_layers)]
            for name in ("heads", "mlp")
        }

    def add(self, plan: Plan) -> None:
        """Count one step."""
        self.steps += 1
        if plan.is_full:
            self._full += 1
            return
        for layer in plan.layers:
            if layer is not None:
                self._add_layer(layer)

    def _add_layer(self, layer: LayerPlan) -> None:
        for name in ("heads", "mlp"):
            counts, units = self._counts[name][layer.layer], getattr(layer, name)
            for unit in range(len(counts)) if units is None else units:
                counts[unit] += 1

    def summary(self, dimension: str) -> CoverageSummary:
        """`dimension`: heads or mlp."""
        counts = [count + self._full for layer in self._counts[dimension] for count in layer]
        steps = max(self.steps, 1)
        return CoverageSummary(
            touched=sum(count > 0 for count in counts) / len(counts),
            mean=sum(counts) / len(counts) / steps,
            least=min(counts) / steps,
        )

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "full": self._full, "counts": self._counts}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.steps, self._full = int(state["steps"]), int(state["full"])
        self._counts = {
            name: [list(layer) for layer in layers] for name, layers in state["counts"].items()
        }
