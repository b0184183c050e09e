"""The scored tokens of a model, gathered from a daemon that holds the latest ones only."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from dskapi.v1.control_pb2 import GetNoiseRequest, GetNoiseResponse, ModeNoise, NoisePoint
from dskctl.daemon import Daemon


def latest_noise(daemon: Daemon, model: str) -> GetNoiseResponse:
    """What is known, with every sample the daemon holds; to be asked for more it refuses. Raises grpc.RpcError."""
    known = daemon.get_noise(GetNoiseRequest(model=model))
    held = max((mode.samples for mode in known.modes), default=0)
    return daemon.get_noise(GetNoiseRequest(model=known.model, samples=held)) if held else known


class Polls:
    """The answers to a question that is asked at intervals: a `Stream` for `dskctl.daemon.relayed`."""

    def __init__(self, ask: Callable[[], GetNoiseResponse], interval_s: float, total_s: float | None) -> None:
        """Ends after `total_s` seconds with one more answer; None: when it is cancelled."""
        self._ask = ask
        self._interval_s = interval_s
        self._total_s = total_s
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[GetNoiseResponse]:
        end = None if self._total_s is None else time.monotonic() + self._total_s
        yield self._ask()
        while end is None or time.monotonic() < end:
            left = self._interval_s if end is None else min(self._interval_s, end - time.monotonic())
            if self._cancelled.wait(max(0.0, left)):
                return
            yield self._ask()

    def cancel(self) -> None:
        self._cancelled.set()


class Recording:
    """All samples that were seen, by mode, in the order in which they were taken."""

    def __init__(self) -> None:
        self.points: defaultdict[int, list[NoisePoint]] = defaultdict(list)
        self.last = GetNoiseResponse()  # without its samples
        self._total: defaultdict[int, int] = defaultdict(int)

    @property
    def count(self) -> int:
        return sum(map(len, self.points.values()))

    def add(self, response: GetNoiseResponse) -> GetNoiseResponse:
        """Takes what is new in `response`; returns it with the new samples alone."""
        fresh: dict[int, list[NoisePoint]] = {mode.mode: self._fresh(mode) for mode in response.modes}
        for mode, points in fresh.items():
            self.points[mode] += points
        self.last = _with_samples(response, {})
        return _with_samples(response, fresh)

    def _fresh(self, mode: ModeNoise) -> list[NoisePoint]:
        """A total below the one before counts anew: the model was loaded again."""
        before = self._total[mode.mode]
        self._total[mode.mode] = mode.total_samples
        count = mode.total_samples - before if mode.total_samples >= before else mode.total_samples
        return list(mode.latest[-count:]) if count else []


def _with_samples(response: GetNoiseResponse, samples: Mapping[int, list[NoisePoint]]) -> GetNoiseResponse:
    copy = GetNoiseResponse()
    copy.CopyFrom(response)
    for mode in copy.modes:
        del mode.latest[:]
        mode.latest.extend(samples.get(mode.mode, ()))
    return copy
