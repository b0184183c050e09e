"""Turns what was measured of a plain graph into advice, with reasons. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dskquant.modes import REFERENCE, PrecisionMode
from dskquant.plain.maker import GraphKind, Int8Method, Layer
from dskquant.plain.noise import GraphNoise

WANTED_SQNR_DB = 20.0
"""Of a mode that is advised: noise of a hundredth of the power of the signal."""

WORTH = 1.1
"""Times as fast as FP32 that a mode must be for its noise to be worth it."""

ENGINES_DIFFER_DB = 6.0


@dataclass(frozen=True, slots=True)
class Figures:
    """A graph of a mode on an engine, as it was measured."""

    name: str  # the mode; "int8, mixed" with layers in float
    mode: PrecisionMode
    engine: str
    method: str
    nbytes: int
    noise: GraphNoise  # against FP32 on the engine of the reference
    ms: float  # median of a run of one sample


@dataclass(frozen=True, slots=True)
class Advice:
    """The mode and engine to serve with, and why, a sentence each."""

    best: Figures
    reasons: tuple[str, ...]


def advise(
    kind: GraphKind,
    layers: Sequence[Layer],
    figures: Sequence[Figures],
    keep_float: Sequence[str],
    wanted_db: float = WANTED_SQNR_DB,
) -> Advice:
    """`figures` has FP32 on at least one engine."""
    float32 = min((each for each in figures if each.mode is REFERENCE), key=_ms)
    best = min((each for each in figures if each.noise.sqnr_db >= wanted_db), key=_ms, default=float32)
    if float32.ms < best.ms * WORTH:
        best = float32
    reasons = [
        _told_kind(kind, layers),
        *_told_modes(figures, float32, wanted_db),
        *_told_engines(figures),
        *_told_mixed(layers, keep_float),
    ]
    return Advice(best, (*reasons, _told_best(best, float32)))


def _ms(figures: Figures) -> float:
    return figures.ms


def _told_kind(kind: GraphKind, layers: Sequence[Layer]) -> str:
    counts = Counter(layer.operator for layer in layers)
    told = ", ".join(f"{count} {operator}" for operator, count in counts.most_common()) or "no layers with weights"
    method = {
        Int8Method.STATIC: "static: the ranges of activations are found on the data",
        Int8Method.DYNAMIC: "dynamic: the activations of transformers differ too much from one input to the next",
    }
    return f"a {kind.value} graph ({told}); INT8 for such graphs is {method[kind.int8]}"


def _told_modes(figures: Sequence[Figures], float32: Figures, wanted_db: float) -> Iterator[str]:
    for name in dict.fromkeys(each.name for each in figures if each.mode is not REFERENCE):
        fastest = min((each for each in figures if each.name == name), key=_ms)
        speed = f"{float32.ms / fastest.ms:.2f} times as fast as FP32 ({fastest.engine})"
        size = f"{fastest.nbytes / float32.nbytes:.0%} of its size"
        yield f"{name}: {speed}, {size}, {_told_noise(fastest.noise, wanted_db)}"


def _told_noise(noise: GraphNoise, wanted_db: float) -> str:
    if noise.sqnr_db < wanted_db:
        return f"{noise.sqnr_db:.1f} dB: too noisy (wanted: {wanted_db:g} dB)"
    flips = "" if noise.top1 in (None, 1.0) else f", though the top-1 of {noise.top1:.1%} of the rows is the same alone"
    return f"{noise.sqnr_db:.1f} dB: exact enough{flips}"


def _told_engines(figures: Sequence[Figures]) -> Iterator[str]:
    for name in dict.fromkeys(each.name for each in figures):
        same = sorted((each for each in figures if each.name == name), key=lambda each: each.noise.sqnr_db)
        worst, best = same[0], same[-1]
        if best.noise.sqnr_db < 2 * WANTED_SQNR_DB and best.noise.sqnr_db - worst.noise.sqnr_db > ENGINES_DIFFER_DB:
            yield (
                f"{name}: {worst.engine} computes it with {worst.noise.sqnr_db:.1f} dB where {best.engine} has "
                f"{best.noise.sqnr_db:.1f} dB: do not serve it there"
            )


def _told_mixed(layers: Sequence[Layer], keep_float: Sequence[str]) -> Iterator[str]:
    if keep_float:
        yield (
            f"leaving {len(keep_float)} of {len(layers)} layers in float makes INT8 exact enough: "
            f"dskquant convert ... --keep-float '{','.join(keep_float)}'"
        )


def _told_best(best: Figures, float32: Figures) -> str:
    if best is float32:
        return f"serve FP32 on {best.engine}: no mode that is exact enough is {WORTH:g} times as fast"
    return (
        f"serve {best.name} on {best.engine}: {best.ms:.2f} ms a run where FP32 takes {float32.ms:.2f} ms, "
        f"at {best.noise.sqnr_db:.1f} dB"
    )
