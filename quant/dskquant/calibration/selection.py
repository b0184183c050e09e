"""Which layers always get the residual plane: those where it takes away the most divergence for its bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dskquant.bits import mean_bits, tensor_bits
from dskquant.engines.protocol import LinearUnit
from dskquant.errors import QuantError
from dskquant.scheme import TensorScheme
from dskquant.store import StoreManifest

Schemes = dict[str, TensorScheme]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the residual plane of one unit of linear layers is worth."""

    unit: LinearUnit
    kl: float  # nats per token that go when the unit computes in INT8 instead of INT4
    bits: int  # that it costs

    @property
    def worth(self) -> float:
        return self.kl / self.bits


def residual_bits(unit: LinearUnit, schemes: Schemes) -> int:
    """Bits of the residual planes of `unit`."""
    return int(sum(tensor_bits(schemes[name]).int8 / 2 for name in unit))


def with_residual(schemes: Schemes, units: Sequence[LinearUnit]) -> Schemes:
    """`schemes` with the residual always on for the layers of `units` alone."""
    chosen = {name for unit in units for name in unit}
    return {name: replace(scheme, always_residual=name in chosen) for name, scheme in schemes.items()}


def by_worth(sensitivities: Sequence[Sensitivity]) -> list[Sensitivity]:
    """The best first; of equals, the first in the order of execution."""
    return sorted(sensitivities, key=lambda item: -item.worth)


def within_budget(
    sensitivities: Sequence[Sensitivity], schemes: Schemes, store: StoreManifest, budget: float
) -> list[LinearUnit]:
    """Units, the best first, for as long as INT4 takes at most `budget` bits per weight over everything.

    Raises QuantError when it takes more without any.
    """
    bare = mean_bits(with_residual(schemes, ()).values(), store).int4
    if bare > budget:
        most = mean_bits(schemes.values(), store).int8
        raise QuantError(
            f"--budget {budget:g}: out of reach; from {bare:.2f} to {most:.2f} bits per weight are possible"
        )
    left = (budget - bare) * store.parameters
    chosen = []
    for item in by_worth(sensitivities):
        if item.bits <= left:
            chosen.append(item.unit)
            left -= item.bits
    return chosen


def within_noise(
    sensitivities: Sequence[Sensitivity], measure: Callable[[Sequence[LinearUnit]], float], max_kl: float
) -> list[LinearUnit]:
    """The fewest units, the best first, with which `measure` gives at most `max_kl`; found by bisection.

    Raises QuantError when it gives more with all.
    """
    units = [item.unit for item in by_worth(sensitivities)]
    if measure(()) <= max_kl:
        return []
    if (least := measure(units)) > max_kl:
        raise QuantError(f"--max-kl {max_kl:g}: out of reach; with the residual plane everywhere it is {least:.4f}")
    enough, too_few = len(units), 0
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if measure(units[:middle]) <= max_kl:
            enough = middle
        else:
            too_few = middle
    return units[:enough]
