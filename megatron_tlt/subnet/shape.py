"""What can be drawn of a model, and in which exact numbers.

Three dimensions are drawn, as in EST (arXiv 2406.06962): layers, attention heads, MLP neurons. Each is a
pool of equal *strata*, and the same number of units is kept in every stratum. Strata are contiguous, so
with `tp_strata` a multiple of the TP size every TP rank keeps the same number of heads and neurons, with
`pp_strata` a multiple of pipeline stages x virtual stages every stage the same number of layers, and the
draw does not depend on which of those layouts is in use.

n query heads, g key/value groups, r = n / g heads a group, f MLP neurons, L layers.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Protocol

DIMENSIONS = ("layers", "heads", "mlp")
GqaUnit = Literal["heads", "groups"]
Rate = float | str
_AUTOMATIC_STRATA = (8, 4, 2)


class HasModelShape(Protocol):
    """Any configuration with Megatron's names for the model's shape."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    swiglu: bool
    seq_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The numbers of a decoder that decide its FLOPs and what can be drawn (Megatron's spelling)."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    swiglu: bool
    seq_length: int
    padded_vocab_size: int

    @classmethod
    def of(cls, model: HasModelShape, *, padded_vocab_size: int) -> "ModelShape":
        """The shape of a model configuration."""
        names = HasModelShape.__annotations__
        return cls(
            **{name: getattr(model, name) for name in names}, padded_vocab_size=padded_vocab_size
        )

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.num_query_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """One dimension as it is drawn. Example, the heads of GPT-2 124M for TP up to 2: 2 strata of 6 units,
    so 1/2 keeps 3 in each and 1/4 is refused."""

    dimension: str
    unit: str
    """What is counted, for messages."""
    strata: int
    size: int
    """Units in a stratum."""
    multiple: int = 1
    """The number kept in a stratum is a multiple of this (alignment)."""
    strata_option: str = ""
    """The option that sets `strata`, for messages; empty when the shape alone decides."""

    @property
    def total(self) -> int:
        return self.strata * self.size

    def legal_rates(self) -> list[Fraction]:
        """All rates that keep a legal number of units, ascending; the last is 1."""
        counts = {*range(self.multiple, self.size, self.multiple), self.size}
        return [Fraction(count, self.size) for count in sorted(counts)]

    def is_legal(self, rate: Fraction) -> bool:
        kept = rate * self.size
        return kept == self.size or (
            0 < kept < self.size and kept.denominator == 1 and int(kept) % self.multiple == 0
        )

    def kept(self, rate: Fraction) -> int:
        """Units kept in each stratum. Raises ValueError, with the nearest legal rates, if not whole."""
        if not self.is_legal(rate):
            raise ValueError(self._refusal(rate))
        return int(rate * self.size)

    def _refusal(self, rate: Fraction) -> str:
        legal = self.legal_rates()
        near = [max((x for x in legal if x < rate), default=None)]
        near.append(min((x for x in legal if x > rate), default=None))
        nearest = " or ".join(str(x) for x in near if x is not None)
        aligned = f", in multiples of {self.multiple}" if self.multiple > 1 else ""
        text = (
            f"rate {rate} of {self.dimension} keeps {float(rate * self.size):g} of {self.size} "
            f"{self.unit} in each of {self.strata} strata, which is not a whole number above 0{aligned}: "
            f"the nearest legal rates are {nearest}"
        )
        fitting = self._fitting_strata(rate)
        if self.strata_option and fitting:
            text += f"; or set {self.strata_option} to one of {fitting}"
        return text

    def _fitting_strata(self, rate: Fraction) -> list[int]:
        return [
            strata
            for strata in range(1, self.total + 1)
            if self.total % strata == 0
            and strata != self.strata
            and replace(self, strata=strata, size=self.total // strata).is_legal(rate)
        ]

    def quantise(self, rate: Fraction) -> Fraction:
        """The largest legal rate not above `rate`, or the smallest legal one."""
        return max((x for x in self.legal_rates() if x <= rate), default=self.legal_rates()[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """The three dimensions of a model as they are drawn."""

    layers: Pool
    heads: Pool
    mlp: Pool
    mlp_block_size: int
    """Neurons that are drawn together."""
    gqa_unit: GqaUnit
    tp_strata: int
    pp_strata: int

    def check_layout(self, *, tensor: int, pipeline: int, virtual: int = 1) -> None:
        """Raise ValueError when ranks of this layout could get unequal work."""
        for name, strata, size in (
            ("est.tp_strata", self.tp_strata, tensor),
            ("est.pp_strata", self.pp_strata, pipeline * virtual),
        ):
            what = (
                f"tensor_model_parallel_size={tensor}"
                if name == "est.tp_strata"
                else f"pipeline_model_parallel_size={pipeline} x virtual stages {virtual} = {size}"
            )
            if strata % size:
                raise ValueError(
                    f"{name}={strata} is not a multiple of {what}: ranks would get unequal subnets; "
                    f"set {name} to a multiple of {size}"
                )


def exact(rate: Rate | int | Fraction, name: str) -> Fraction:
    """The rational that was written: "1/3", 0.25 and "0.25" are exact. Raises ValueError outside (0, 1]."""
    try:
        value = Fraction(str(rate))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{name}={rate!r} is not a number or a fraction such as 1/2") from None
    if not 0 < value <= 1:
        raise ValueError(f"{name}={rate} must be above 0 and at most 1")
    return value


def build_pools(
    shape: ModelShape,
    *,
    tp_strata: int,
    pp_strata: int,
    gqa_unit: GqaUnit = "heads",
    mlp_block_size: int = 16,
    mlp_align: int = 1,
) -> Pools:
    """Cut each dimension into strata. Raises ValueError, with the numbers, when one does not divide."""
    _check_positive(tp_strata=tp_strata, pp_strata=pp_strata, mlp_align=mlp_align)
    _check_positive(mlp_block_size=mlp_block_size)
    groups, blocks = shape.num_query_groups, shape.ffn_hidden_size // mlp_block_size
    if shape.ffn_hidden_size % mlp_block_size:
        raise ValueError(
            f"est.mlp_block_size={mlp_block_size} does not divide ffn_hidden_size="
            f"{shape.ffn_hidden_size}: use one of {_divisors(shape.ffn_hidden_size, 128)}"
        )
    for name, strata, total, what in (
        ("est.tp_strata", tp_strata, groups, "num_query_groups"),
        ("est.tp_strata", tp_strata, blocks, f"MLP blocks of {mlp_block_size} neurons"),
        ("est.pp_strata", pp_strata, shape.num_layers, "num_layers"),
    ):
        if total % strata:
            raise ValueError(
                f"{name}={strata} does not divide {what}={total}: use one of {_divisors(total, 128)}"
            )
    inside_groups = gqa_unit == "heads" and groups < shape.num_attention_heads
    return Pools(
        layers=Pool(
            dimension="layers", unit="layers", strata=pp_strata,
            size=shape.num_layers // pp_strata, strata_option="est.pp_strata",
        ),
        heads=Pool(
            dimension="heads", unit="query heads of a group", strata=groups,
            size=shape.heads_per_group,
        )
        if inside_groups
        else Pool(
            dimension="heads", unit="key/value groups" if shape.heads_per_group > 1 else "heads",
            strata=tp_strata, size=groups // tp_strata, strata_option="est.tp_strata",
        ),
        mlp=Pool(
            dimension="mlp", unit=f"blocks of {mlp_block_size} neurons", strata=tp_strata,
            size=blocks // tp_strata,
            multiple=math.lcm(mlp_align, mlp_block_size) // mlp_block_size,
            strata_option="est.tp_strata",
        ),
        mlp_block_size=mlp_block_size,
        gqa_unit="heads" if inside_groups else "groups",
        tp_strata=tp_strata,
        pp_strata=pp_strata,
    )  # fmt: skip


def automatic_strata(
    shape: ModelShape,
    rates: dict[str, set[Fraction]],
    *,
    tp_strata: int | None,
    pp_strata: int | None,
    **options: object,
) -> tuple[int, int]:
    """(tp_strata, pp_strata) where None is replaced by the largest power of two, at most 8, at which all
    `rates` are legal: a function of model and schedule only, not of the layout in use."""
    if tp_strata is None:
        tp_strata = next(
            (x for x in _AUTOMATIC_STRATA if _all_legal(shape, rates, x, 1, ("heads", "mlp"), options)), 1
        )
    if pp_strata is None:
        pp_strata = next(
            (x for x in _AUTOMATIC_STRATA if _all_legal(shape, rates, 1, x, ("layers",), options)), 1
        )
    return tp_strata, pp_strata


def _all_legal(
    shape: ModelShape,
    rates: dict[str, set[Fraction]],
    tp_strata: int,
    pp_strata: int,
    dimensions: tuple[str, ...],
    options: dict,
) -> bool:
    blocks = shape.ffn_hidden_size // options.get("mlp_block_size", 16)
    if shape.num_query_groups % tp_strata or blocks % tp_strata or shape.num_layers % pp_strata:
        return False
    pools = build_pools(shape, tp_strata=tp_strata, pp_strata=pp_strata, **options)
    return all(getattr(pools, name).is_legal(rate) for name in dimensions for rate in rates[name])


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"est.{name}={value} must be at least 1")


def _divisors(number: int, largest: int) -> list[int]:
    return [x for x in range(1, min(number, largest) + 1) if number % x == 0]
