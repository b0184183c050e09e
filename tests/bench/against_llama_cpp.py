"""The daemon, over its socket and with both engines, against llama.cpp's own benchmarks and llama-server."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.bench.llama_cpp import LlamaCpp, LlamaServer
from tests.bench.report import Section
from tests.bench.served import Round, Served, random_prompt, serving

from dskd.config import EngineUse
from dskquant.modes import PrecisionMode

PROMPT, NEW = 32, 96
"""Tokens of a decoding stream."""

PREFILL = 512
WHOLE_NEW = 128
REPEATS = 3

Measure = Callable[[], Awaitable[float]]
"""One measurement, in tokens a second."""


class Rival(NamedTuple):
    """What llama.cpp makes of a model."""

    kind: str  # of its quantization
    gguf: Path


class Model(NamedTuple):
    """One of both sides."""

    name: str
    store: Path
    rivals: Mapping[PrecisionMode, Rival]


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared."""

    name: str
    wanted: float  # ratio to llama.cpp
    ours: Callable[[Served, PrecisionMode], Awaitable[tuple[float, Round]]]
    theirs: Callable[[LlamaCpp, LlamaServer, Path], float]


def _decode(streams: int, wanted: float) -> Case:
    async def ours(served: Served, mode: PrecisionMode) -> tuple[float, Round]:
        made = await served.round(streams, PROMPT, NEW, mode)
        return made.decode_rate, made

    def theirs(tools: LlamaCpp, server: LlamaServer, gguf: Path) -> float:
        return tools.decode_rate(gguf, streams, PROMPT, NEW)

    return Case(f"decode, {streams} stream{'s' if streams > 1 else ''}", wanted, ours, theirs)


async def _our_prefill(served: Served, mode: PrecisionMode) -> tuple[float, Round]:
    made = await served.round(1, PREFILL, 1, mode)
    return PREFILL / made.first_s, made


async def _our_request(served: Served, mode: PrecisionMode) -> tuple[float, Round]:
    made = await served.round(1, PREFILL, WHOLE_NEW, mode)
    return WHOLE_NEW / made.seconds, made


def _their_prefill(tools: LlamaCpp, server: LlamaServer, gguf: Path) -> float:
    return tools.prefill_rate(gguf, PREFILL)


def _their_request(tools: LlamaCpp, server: LlamaServer, gguf: Path) -> float:
    return WHOLE_NEW / server.answer(random_prompt(PREFILL), WHOLE_NEW)


PREFILL_CASE = Case(f"prefill {PREFILL}", 1.9, _our_prefill, _their_prefill)
REQUEST_CASE = Case(f"{PREFILL} tokens in, {WHOLE_NEW} out", 1.2, _our_request, _their_request)
CASES = {
    PrecisionMode.INT4: (
        _decode(1, 1.0),
        _decode(2, 1.3),
        _decode(4, 1.3),
        _decode(8, 2.0),
        PREFILL_CASE,
        REQUEST_CASE,
    ),
    PrecisionMode.INT8: (_decode(1, 1.0), PREFILL_CASE, REQUEST_CASE),
}


def measure(models: Sequence[Model], tools: LlamaCpp) -> Section:
    """All cases of all models."""
    rows = [row for model in models for row in asyncio.run(compare(model, tools))]
    return section(rows)


async def compare(model: Model, tools: LlamaCpp) -> list[list[str]]:
    """The rows of one model."""
    async with serving(model.store, EngineUse.AUTO.value) as served:
        found = [await _compare_mode(model, mode, served, tools) for mode in CASES]
    return [row for rows in found for row in rows]


async def _compare_mode(model: Model, mode: PrecisionMode, served: Served, tools: LlamaCpp) -> list[list[str]]:
    rival = model.rivals[mode]
    rows = []
    with tools.server(rival.gguf) as server:
        for case in CASES[mode]:
            rows.append([model.name, mode.value, rival.kind, *await _run(case, mode, served, tools, server, rival)])
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    return rows


async def _run(
    case: Case, mode: PrecisionMode, served: Served, tools: LlamaCpp, server: LlamaServer, rival: Rival
) -> list[str]:
    """Both sides in turn; the first turn warms up."""
    ours, theirs, engines = [], [], Counter[str]()
    for repeat in range(REPEATS + 1):
        rate, made = await case.ours(served, mode)
        other = await asyncio.to_thread(case.theirs, tools, server, rival.gguf)
        if repeat > 0:
            ours.append(rate)
            theirs.append(other)
            engines += made.engines
    ratio = np.median(ours) / np.median(theirs)
    share = engines[EngineUse.ONNXRUNTIME.value] / engines.total()
    figures = [f"{np.median(ours):.1f}", f"{np.median(theirs):.1f}", f"{ratio:.2f}x"]
    return [case.name, *figures, f"{case.wanted:.1f}x", f"{share:.0%}"]


def section(rows: Sequence[Sequence[str]]) -> Section:
    """Of rows that `compare` has made."""
    return Section(
        "Speed against llama.cpp",
        f'Tokens a second (of a whole request: of its answer). dskd: the daemon with `engine = "auto"`, clients over '
        "its unix socket, default monitor, activations of INT8. llama.cpp: built for this CPU; llama-bench for one "
        "stream and for prefill, llama-batched-bench for more streams, llama-server over HTTP for whole requests. All "
        f"cores for both. Decoding: {NEW} tokens after a prompt of {PROMPT}. Medians of {REPEATS} turns of one and the "
        "other, after one that warms up. Slots: share of the tokens that ONNX Runtime has made.",
        ["model", "mode", "llama.cpp", "case", "dskd", "llama.cpp", "ratio", "wanted", "slots"],
        rows,
    )
