"""Which layers of a plain graph make the noise of INT8, found by quantizing one group of them at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dskquant.errors import EngineError
from dskquant.modes import PrecisionMode
from dskquant.parameter_set import Progress
from dskquant.plain.maker import GraphMaker, Layer, Recipe
from dskquant.plain.noise import GraphNoise
from dskquant.plain.reference import Reference

GROUPS = 16
MOST_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class GroupNoise:
    """The noise of INT8 in a few neighbouring layers alone."""

    layers: tuple[str, ...]
    weights: int
    sqnr_db: float

    @property
    def power(self) -> float:
        """Of the noise, as a share of that of the signal."""
        return float(10 ** (-self.sqnr_db / 10))


@dataclass(frozen=True, slots=True)
class Mixed:
    """INT8 with some layers left in float."""

    keep_float: tuple[str, ...]
    noise: GraphNoise
    path: Path
    method: str


def measure_groups(
    maker: GraphMaker, recipe: Recipe, reference: Reference, scratch: Path, progress: Progress
) -> list[GroupNoise]:
    """In the order of execution. Raises EngineError where INT8 cannot be made of the graph."""
    groups, found = list(_groups(maker.layers)), []
    path = scratch / f"group{maker.suffix}"
    for done, group in enumerate(groups):
        progress("measuring layers", done, len(groups))
        others = {layer.name for layer in maker.layers} - {layer.name for layer in group}
        noise = _make(maker, replace(recipe, keep_float=frozenset(others)), reference, path)[0]
        if noise is not None:
            names = tuple(layer.name for layer in group)
            found.append(GroupNoise(names, sum(layer.weights for layer in group), noise.sqnr_db))
    progress("measuring layers", len(groups), len(groups))
    return found


def find_mixed(
    maker: GraphMaker,
    recipe: Recipe,
    reference: Reference,
    groups: Sequence[GroupNoise],
    wanted_db: float,
    path: Path,
) -> Mixed | None:
    """The fewest noisy groups left in float with which the rest is exact enough; None where it never is.

    Noise adds up: where that of the groups that are left promises enough, the graph is made and measured. Where it
    is not exact enough all the same, further groups are left out, for MOST_ATTEMPTS graphs.
    """
    noisiest = sorted(groups, key=lambda group: group.power, reverse=True)
    attempts = 0
    for count in range(1, len(noisiest)):
        if sum(group.power for group in noisiest[count:]) > 10 ** (-wanted_db / 10):
            continue
        kept = frozenset(itertools.chain.from_iterable(group.layers for group in noisiest[:count]))
        noise, method = _make(maker, replace(recipe, keep_float=kept), reference, path)
        if noise is not None and noise.sqnr_db >= wanted_db:
            return Mixed(tuple(layer.name for layer in maker.layers if layer.name in kept), noise, path, method)
        attempts += 1
        if attempts == MOST_ATTEMPTS:
            return None
    return None


def _make(maker: GraphMaker, recipe: Recipe, reference: Reference, path: Path) -> tuple[GraphNoise | None, str]:
    """None where no layer is left that the method quantizes, or the engine cannot run what was made."""
    try:
        method = maker.make(PrecisionMode.INT8, recipe, reference.samples, path)
        return reference.noise_of(reference.load(path), path.name), method
    except EngineError:
        return None, ""


def _groups(layers: Sequence[Layer]) -> Iterator[Sequence[Layer]]:
    """At most GROUPS groups of neighbours, of about as many layers each."""
    count = min(GROUPS, len(layers))
    for number in range(count):
        yield layers[number * len(layers) // count : (number + 1) * len(layers) // count]
