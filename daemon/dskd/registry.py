"""The models the daemon knows, loaded or not. Loads run in the background; a failed one leaves the others untouched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog

from dskd import memory
from dskd.config import ModelConfig
from dskd.errors import (
    EXPECTED_ERRORS,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
    UnknownModelError,
)
from dskd.host import HostFactory, ServedModel, is_plain
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.types import HistoryEntry, ManagerSnapshot
from dskd.states import LOADABLE, PASSING, ModelState
from dskquant.modes import PrecisionMode

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()

T = TypeVar("T")

SHUTTING_DOWN = "the daemon is shutting down"

RETRY_LOADING_S = 2.0
"""When to ask again for a model that is loading: a load takes seconds at least."""


@dataclass(slots=True)
class ModelEntry:
    """One known model. Only the registry changes it."""

    name: str
    config: ModelConfig
    from_path: bool = False  # not of the configuration: forgotten when its load fails
    state: ModelState = ModelState.UNLOADED
    reason: str = ""  # why the state is FAILED
    host: ServedModel | None = None  # set while SERVING and UNLOADING
    loading: asyncio.Task[None] | None = None
    closing: asyncio.Task[int] | None = None

    @property
    def default_mode(self) -> PrecisionMode:
        """The mode that it begins with, and that quant configs return to."""
        if self.host is not None and is_plain(self.host):
            return self.host.config.default_mode
        return self.config.default_mode

    @property
    def serving_host(self) -> ServedModel:
        """The host of a model that serves.

        Raises UnavailableError in a state that passes by itself, FailedPreconditionError in the others.
        """
        if self.host is not None and self.state is ModelState.SERVING:
            return self.host
        if self.state is ModelState.LOADING:
            raise UnavailableError(f"model {self.name!r} is loading: wait", RETRY_LOADING_S)
        message = f"model {self.name!r} is {self.state.value}" + (f": {self.reason}" if self.reason else "")
        if self.state in PASSING:
            raise UnavailableError(message)
        raise FailedPreconditionError(f"models/{self.name}", f"{message}; load it first")


class ModelRegistry:
    """Owns the hosts: which models there are, in which state. Belongs to the asyncio thread."""

    def __init__(
        self, configs: Mapping[str, ModelConfig], make_host: HostFactory, events: EventBus, history: History
    ) -> None:
        self._entries = {name: ModelEntry(name, config) for name, config in configs.items()}
        self._make_host = make_host
        self._events = events
        self._history = history
        self._closed = False

    def entries(self) -> list[ModelEntry]:
        """All known models in name order."""
        return sorted(self._entries.values(), key=lambda entry: entry.name)

    def get(self, name: str) -> ModelEntry:
        """The model of that name. Raises UnknownModelError with the known ones."""
        if name not in self._entries:
            raise UnknownModelError(name, self._entries)
        return self._entries[name]

    def resolve(self, name: str) -> ModelEntry:
        """Like `get`; the empty name means the only loaded model, or the only one that is loading while none is.

        Raises InvalidArgumentError when it is ambiguous.
        """
        if name:
            return self.get(name)
        loaded = [entry for entry in self.entries() if entry.host is not None]
        meant = loaded or [entry for entry in self.entries() if entry.state is ModelState.LOADING]
        if len(meant) == 1:
            return meant[0]
        if meant:
            problem = f"must be named, unless exactly one model is loaded; there are: {_listed(meant)}"
        elif self._entries:
            problem = f"no model is loaded: `dskctl load NAME`; configured: {_listed(self.entries())}"
        else:
            problem = "no model is loaded, and none is configured"
        raise InvalidArgumentError("model", problem)

    def add(self, name: str, config: ModelConfig) -> None:
        """Makes a model known, until a load of it fails; replaces one that was made known so and is not loaded.

        Raises InvalidArgumentError when the name belongs to another one.
        """
        known = self._entries.get(name)
        if known is not None and known.config == config:
            return
        if known is not None and not (known.from_path and known.state in LOADABLE):
            raise InvalidArgumentError("model", f"{name!r} is the name of the model at {known.config.path}")
        self._entries[name] = ModelEntry(name, config, from_path=True)

    async def load(self, name: str, actor: str) -> None:
        """Loads a model. The load goes on when the caller is cancelled. Raises what `start_load` and the host raise."""
        await _outcome(self.start_load(name, actor))

    def start_load(self, name: str, actor: str) -> asyncio.Task[None]:
        """Begins to load a model; the task ends when it serves, or raises why it cannot.

        Raises FailedPreconditionError unless the model is unloaded or failed, UnavailableError after `close`.
        """
        entry = self.get(name)
        if self._closed:
            raise UnavailableError(SHUTTING_DOWN)
        if entry.state not in LOADABLE:
            raise FailedPreconditionError(f"models/{name}", f"model {name!r} is {entry.state.value} already")
        self._enter(entry, ModelState.LOADING)
        entry.loading = asyncio.create_task(self._load(entry, actor), name=f"load {name}")
        entry.loading.add_done_callback(_retrieve_error)
        return entry.loading

    async def _load(self, entry: ModelEntry, actor: str) -> None:
        started = time.monotonic()
        try:
            host = self._make_host(entry.name, entry.config, self._events, self._history)
            await host.load()
        except asyncio.CancelledError:
            self._enter(entry, ModelState.UNLOADED)
            raise
        except Exception as error:
            self._fail(entry, "load", actor, error)
            if entry.from_path:
                del self._entries[entry.name]
            raise
        memory.collect_garbage()
        entry.host = host
        first = host.snapshot()
        phases_ms = {"build": (time.monotonic() - started) * 1e3}
        record = replace(_committed(entry.name, "load", actor, first), to_mode=first.mode, phases_ms=phases_ms)
        self._history.append(record)
        self._enter(entry, ModelState.SERVING)

    async def unload(self, name: str, actor: str, grace_s: float) -> int:
        """Unloads a model; open requests finish within `grace_s` seconds. Returns how many were aborted.

        The unload goes on when the caller is cancelled. Raises FailedPreconditionError unless the model serves.
        """
        entry = self.get(name)
        if entry.host is None or entry.state is not ModelState.SERVING:
            raise FailedPreconditionError(f"models/{name}", f"model {name!r} is not loaded but {entry.state.value}")
        return await _outcome(self._start_close(entry, entry.host, actor, grace_s))

    async def close(self, grace_s: float) -> int:
        """Stops the loads, unloads every model, and loads no more. Returns how many requests were aborted."""
        self._closed = True
        await _cancel_all(entry.loading for entry in self._entries.values())
        closings = [self._start_close(entry, entry.host, "daemon", grace_s) for entry in self.entries() if entry.host]
        outcomes = await asyncio.gather(*map(_outcome, closings), return_exceptions=True)  # failures are logged by now
        return sum(outcome for outcome in outcomes if isinstance(outcome, int))

    async def abort(self) -> int:
        """Like `close` without any grace, not even for models that are being unloaded with one."""
        await _cancel_all(entry.closing for entry in self._entries.values())
        return await self.close(0)

    def _start_close(self, entry: ModelEntry, host: ServedModel, actor: str, grace_s: float) -> asyncio.Task[int]:
        if entry.closing is None or entry.closing.done():
            work = self._close_host(entry, host, actor, grace_s)
            entry.closing = asyncio.create_task(work, name=f"unload {entry.name}")
            entry.closing.add_done_callback(_retrieve_error)
        return entry.closing

    async def _close_host(self, entry: ModelEntry, host: ServedModel, actor: str, grace_s: float) -> int:
        last = host.snapshot()
        self._enter(entry, ModelState.UNLOADING)
        try:
            aborted = await host.close(grace_s)
        except Exception as error:
            entry.host = None
            self._fail(entry, "unload", actor, error)
            raise
        entry.host = None
        self._history.append(replace(_committed(entry.name, "unload", actor, last), from_mode=last.mode))
        self._enter(entry, ModelState.UNLOADED)
        return aborted

    def _fail(self, entry: ModelEntry, kind: str, actor: str, error: Exception) -> None:
        reason = str(error) or repr(error)
        unexpected = None if isinstance(error, EXPECTED_ERRORS) else error
        log.error("model failed", model=entry.name, during=kind, reason=reason, exc_info=unexpected)
        self._history.append(HistoryEntry(entry.name, kind, actor, "rejected", reason))
        self._enter(entry, ModelState.FAILED, reason)

    def _enter(self, entry: ModelEntry, state: ModelState, reason: str = "") -> None:
        entry.state, entry.reason = state, reason
        message = f"model {entry.name} is {state.value}" + (f": {reason}" if reason else "")
        self._events.publish(f"model.{state.value}", entry.name, message)
        log.info("model state", model=entry.name, state=state.value)


def _listed(entries: Iterable[ModelEntry]) -> str:
    return ", ".join(f"{entry.name} ({entry.state.value})" for entry in entries)


def _committed(model: str, kind: str, actor: str, state: ManagerSnapshot) -> HistoryEntry:
    return HistoryEntry(
        model, kind, actor, "committed", generation=state.generation, hash=state.hash, parameter_set=state.parameter_set
    )


async def _outcome(task: asyncio.Task[T]) -> T:
    """The result of `task`, which goes on when the waiting is cancelled. Raises UnavailableError if it was stopped."""
    await asyncio.wait([task])
    if task.cancelled():
        raise UnavailableError(SHUTTING_DOWN)
    return task.result()


async def _cancel_all(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """A failure is told by the state of the model; asyncio need not warn that nobody awaited the task."""
    if not task.cancelled():
        task.exception()
