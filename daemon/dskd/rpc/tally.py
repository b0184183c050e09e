"""How many requests were answered, how many were not, and how long that took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dskapi.v1 import inference_pb2


@dataclass(slots=True)
class Total:
    """Times added up."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass(slots=True)
class Tally:
    """The requests to one model since the daemon started; those that were cancelled are not counted."""

    answered: Total = field(default_factory=Total)  # arrival to last token
    failed: Total = field(default_factory=Total)  # arrival to refusal or failure
    parsing: Total = field(default_factory=Total)  # the parts of `answered`: checking and encoding the prompt,
    queue: Total = field(default_factory=Total)  # waiting for the first step,
    computing: Total = field(default_factory=Total)  # and the rest
    latest: float = 0.0  # when the last request was answered, seconds since the epoch

    def add(self, timings: inference_pb2.Timings, parsing_s: float) -> None:
        """Counts a request that was answered."""
        total_s, queue_s = timings.total_ms / 1e3, timings.queue_ms / 1e3
        self.answered.add(total_s)
        self.parsing.add(parsing_s)
        self.queue.add(queue_s)
        self.computing.add(max(0.0, total_s - parsing_s - queue_s))
        self.latest = time.time()

    @contextmanager
    def failures(self, arrived: float) -> Iterator[None]:
        """Counts the error that ends the block, if one does; `arrived` is of `time.monotonic`."""
        try:
            yield
        except Exception:
            self.failed.add(time.monotonic() - arrived)
            raise
