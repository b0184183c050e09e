"""Work for clients that takes a while: one piece at a time, in a thread that nothing else has to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dskd.errors import ResourceExhaustedError

MOST_WAITING = 8
RETRY_AFTER_S = 1.0

T = TypeVar("T")


class OneAtATime:
    """Does what it is given in the order in which it comes. Belongs to the asyncio thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=what)
        self._unfinished = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises ResourceExhaustedError when too much waits already.

        Of a caller that is cancelled while its work waits the work is never begun.
        """
        if self._unfinished > MOST_WAITING:
            raise ResourceExhaustedError(self._what, f"{self._unfinished} {self._what} wait already", RETRY_AFTER_S)
        self._unfinished += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._unfinished -= 1
