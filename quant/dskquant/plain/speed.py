"""How long runs of several graphs take, measured side by side so that a noisy machine is unfair to none of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import TypeVar

from dskquant.plain.protocol import PlainGraph, Tensors

Key = TypeVar("Key")
ROUNDS = 15
LEAST_ROUNDS = 3
BUDGET_S = 20.0


def median_ms(graphs: Mapping[Key, PlainGraph], sample: Tensors) -> dict[Key, float]:
    """Median milliseconds of a run of each graph: up to ROUNDS rounds through all of them, or as BUDGET_S allows."""
    for graph in graphs.values():
        graph.run(sample)  # the first run packs weights
    times: dict[Key, list[float]] = {key: [] for key in graphs}
    for _ in rounds(ROUNDS, LEAST_ROUNDS, BUDGET_S):
        for key, graph in graphs.items():
            times[key].append(_run_ms(graph, sample))
    return {key: median(values) for key, values in times.items()}


def rounds(most: int, least: int, budget_s: float) -> Iterator[int]:
    """Numbers from 0 to below `most`; after `budget_s` seconds no more of them, once there were `least`."""
    began = time.perf_counter()
    for number in range(most):
        if number >= least and time.perf_counter() - began > budget_s:
            return
        yield number


def _run_ms(graph: PlainGraph, sample: Tensors) -> float:
    begin = time.perf_counter()
    graph.run(sample)
    return (time.perf_counter() - begin) * 1e3
