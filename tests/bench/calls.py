"""Clients that call one method of a daemon as fast as it answers, in one thread: what is measured is the daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass
class Calls:
    """What clients saw."""

    span_s: float
    seconds: list[float] = field(default_factory=list)  # of each call
    answers: list[tuple[int, bytes]] = field(default_factory=list)  # index of the request, and what came

    @property
    def per_s(self) -> float:
        return len(self.seconds) / self.span_s

    def percentile_ms(self, percent: float) -> float:
        return float(np.percentile(self.seconds, percent)) * 1e3


def call_for(target: str, requests: Sequence[bytes], clients: int, span_s: float) -> Calls:
    """Has `clients` clients, each with a connection of its own, ask again as soon as they have an answer.

    Requests and answers are bytes: nothing is encoded meanwhile.
    """
    return asyncio.run(_call_for(target, requests, clients, span_s))


async def _call_for(target: str, requests: Sequence[bytes], clients: int, span_s: float) -> Calls:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target, options=options) for _ in range(clients)]
    calls = [channel.unary_unary(MODEL_INFER) for channel in channels]
    await asyncio.gather(*(call(requests[0]) for call in calls))  # connects
    seen, began = Calls(span_s), time.perf_counter()
    await asyncio.gather(*(_ask(call, client, requests, began + span_s, seen) for client, call in enumerate(calls)))
    seen.span_s = time.perf_counter() - began
    await asyncio.gather(*(channel.close() for channel in channels))
    return seen


async def _ask(call: Any, client: int, requests: Sequence[bytes], end: float, seen: Calls) -> None:
    index = client
    while (began := time.perf_counter()) < end:
        answer = await call(requests[index])
        seen.seconds.append(time.perf_counter() - began)
        seen.answers.append((index, answer))
        index = (index + 1) % len(requests)
