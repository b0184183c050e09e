"""The noise of single requests, for `scope = "request"`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from dskd.monitor.noise import NoiseWatch
from dskquant.modes import PrecisionMode

MAX_REQUESTS = 4096
"""More than are ever open; those not heard of for longest are forgotten first."""

SILENCE_S = 120.0
"""A request that nothing was heard of for this long has ended."""


@dataclass(slots=True)
class RequestRecord:
    """One request; `watches` by the mode that was scored."""

    request_id: str
    heard: float
    watches: dict[PrecisionMode, NoiseWatch] = field(default_factory=dict)
    has_news: bool = False
    escalated: PrecisionMode | None = None  # the mode that it was told to be served in at least

    @property
    def is_tripped(self) -> bool:
        return any(watch.fallback.is_tripped for watch in self.watches.values())


class RequestBook:
    """The requests that were heard of."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()  # least recently heard of first
        self._news: list[RequestRecord] = []

    def hear(self, request_id: str, now: float) -> RequestRecord:
        """The record of a request that is open at `now`."""
        record = self._records.setdefault(request_id, RequestRecord(request_id, now))
        record.heard = now
        self._records.move_to_end(request_id)
        if len(self._records) > MAX_REQUESTS:
            self._records.popitem(last=False)
        return record

    def mark(self, record: RequestRecord) -> None:
        """There is something new to decide of it."""
        if not record.has_news:
            record.has_news = True
            self._news.append(record)

    def take_news(self) -> list[RequestRecord]:
        """The marked ones that have not ended, unmarked."""
        news, self._news = self._news, []
        for record in news:
            record.has_news = False
        return [record for record in news if self._records.get(record.request_id) is record]

    def forget(self, request_id: str) -> None:
        """The request has ended, if it was known."""
        self._records.pop(request_id, None)

    def forget_silent(self, now: float) -> None:
        """Forgets the requests that have ended without a word."""
        while self._records and now - next(iter(self._records.values())).heard > SILENCE_S:
            self._records.popitem(last=False)

    def forget_calm(self) -> None:
        """Forgets the requests that have not tripped."""
        self._records = OrderedDict((name, record) for name, record in self._records.items() if record.is_tripped)

    def tripped(self) -> list[RequestRecord]:
        """Those with a mode that has tripped."""
        return [record for record in self._records.values() if record.is_tripped]
