"""Carries the outputs of the step loop from its thread to the requests that wait for them on the asyncio thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dskd.engine.request import StepOutput


class AnswerQueues:
    """A queue of outputs for every open request. Make it on the asyncio thread."""

    def __init__(self) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[StepOutput]] = {}

    @contextmanager
    def open(self, request_id: str) -> Iterator[asyncio.Queue[StepOutput]]:
        """The queue of a request, fed while the context is open."""
        queue = self._queues[request_id] = asyncio.Queue()
        try:
            yield queue
        finally:
            del self._queues[request_id]

    def deliver(self, outputs: list[StepOutput]) -> None:
        """Hands over what one step made; for the step loop's thread, which it never blocks."""
        self._asyncio.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:  # else its client has gone
                queue.put_nowait(output)
