"""The daemon as its users run it, a process of its own, and what clients of it see."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.daemon_process import Client, connected, daemon_process

from dskapi.v1 import inference_pb2
from dskd.rpc.convert import MODES
from dskquant.modes import PrecisionMode

NAME = "bench"
CACHE_BYTES = 1 << 30

_rng = np.random.default_rng(0)


@dataclass(slots=True)
class Stream:
    """When the tokens of one answer came, and which engines made them."""

    arrived: list[float] = field(default_factory=list)  # seconds of `time.perf_counter`
    engines: list[str] = field(default_factory=list)

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        now = time.perf_counter()
        self.arrived += [now] * len(response.tokens)
        self.engines += [token.engine for token in response.tokens]


@dataclass(frozen=True, slots=True)
class Round:
    """Answers that were asked for at once, at `began`."""

    began: float
    streams: Sequence[Stream]

    @property
    def seconds(self) -> float:
        """Until the last token of all."""
        return max(stream.arrived[-1] for stream in self.streams) - self.began

    @property
    def first_s(self) -> float:
        """Until the first token of all."""
        return min(stream.arrived[0] for stream in self.streams) - self.began

    @property
    def decode_rate(self) -> float:
        """Tokens a second of all streams, while all of them decode."""
        begin = max(stream.arrived[0] for stream in self.streams)
        end = min(stream.arrived[-1] for stream in self.streams)
        made = sum(begin < at <= end for stream in self.streams for at in stream.arrived)
        return made / (end - begin)

    @property
    def engines(self) -> Counter[str]:
        """Tokens by the engine that made them."""
        return Counter(itertools.chain.from_iterable(stream.engines for stream in self.streams))


class Served:
    """A client of a daemon that serves one model."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def round(self, streams: int, prompt: int, new: int, mode: PrecisionMode | None = None) -> Round:
        """Answers of `new` tokens to different random prompts of `prompt` tokens; `mode`: of these requests alone."""
        began = time.perf_counter()
        return Round(began, await asyncio.gather(*(self.stream(prompt, new, mode) for _ in range(streams))))

    async def stream(self, prompt: int, new: int, mode: PrecisionMode | None = None) -> Stream:
        """One answer."""
        call = self.client.inference.Generate(_request(prompt, new, mode))
        stream = Stream()
        async for response in call:
            stream.add(response)
        return stream


def _request(prompt: int, new: int, mode: PrecisionMode | None) -> inference_pb2.GenerateRequest:
    tokens = inference_pb2.TokenIds(ids=random_prompt(prompt))
    precision = MODES[mode] if mode else None
    return inference_pb2.GenerateRequest(tokens=tokens, max_new_tokens=new, ignore_eos=True, precision=precision)


def random_prompt(length: int) -> list[int]:
    """Ids of ordinary tokens of SmolLM2's vocabulary."""
    return _rng.integers(10, 40_000, length).tolist()


@asynccontextmanager
async def serving(store: Path, engine: str, **settings: Any) -> AsyncIterator[Served]:
    """A daemon with the default settings but for these of the model, for limits that random weights do not keep."""
    model = {"path": str(store), "engine": engine, "kv_cache_bytes": CACHE_BYTES, **settings}
    tables = {
        NAME: model,
        f"{NAME}.proof": {"max_kl": 100.0, "min_agreement": 0.0},
        f"{NAME}.monitor": {"min_agreement": 0.0},
        f"{NAME}.monitor.threshold": {"int4": 1000.0, "int8": 1000.0},
    }
    with daemon_process(tables) as daemon:
        await asyncio.to_thread(daemon.start)
        async with connected(daemon) as client:
            yield Served(client)
        await asyncio.to_thread(daemon.stop)
