"""Applies what the quant configs of a directory say, for as long as it runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from dskd import quant_config
from dskd.config import WatchConfig
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.quant_config import QuantConfig
from dskd.typed_toml import ConfigError
from dskd.watch.applier import Applier
from dskd.watch.drop_ins import shown
from dskd.watch.hints import Hints
from dskd.watch.scan import FileState, read_directory
from dskd.watch.settling import Settling
from dskd.watch.state_file import WatchState
from dskd.watch.target import Target

DEBOUNCE_S = 0.05
"""Hints that come this close together lead to one look."""

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


class Watcher:
    """Watches `config.directory`, which must be set. Belongs to the asyncio thread, but for `rescan`."""

    def __init__(
        self, config: WatchConfig, state_file: Path, target: Target, history: History, events: EventBus
    ) -> None:
        if config.directory is None:
            raise ValueError("there is no directory to watch")
        self._config = config
        self._directory = config.directory.absolute()
        self._state_file = state_file
        self._events = events
        self._woken = asyncio.Event()
        self._applier = Applier(state_file, config.settle_s, target, history, events, self._woken)
        self._hints = Hints(self._directory, self._hint, config.polling)
        self._files = Settling(config.settle_s)
        self._damaged: set[str] = set()  # files whose present content is refused
        self._waiting: set[str] = set()  # files that have settled and are not taken in yet
        self._held: set[str] = set()  # files that somebody has open for writing
        self._first_look: float | None = None  # when the directory was there for the first time
        self._next_look = 0.0
        self._absence = ""  # why the directory cannot be read
        self._retry_asked = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Watches until it is cancelled; then it ends its threads and what it began to apply."""
        self._loop = asyncio.get_running_loop()
        following = asyncio.create_task(self._follow_models(), name="watch models")
        try:
            await self._restore()
            await self._watch()
        finally:
            self._loop = None
            following.cancel()
            await self._applier.close()
            await asyncio.to_thread(self._hints.close)

    def rescan(self) -> None:
        """Asks for a look at everything, and for another try of what was refused. May be called from any thread."""
        if self._loop is not None:  # otherwise the first look is still to come, or the last one was
            self._loop.call_soon_threadsafe(self._ask_again)

    # When to look

    def _hint(self) -> None:
        loop = self._loop
        if loop is not None and not self._woken.is_set():
            loop.call_soon_threadsafe(self._woken.set)

    def _ask_again(self) -> None:
        self._retry_asked = True
        self._hints.reconsider()
        self._woken.set()

    async def _follow_models(self) -> None:
        with self._events.subscribe() as events:
            async for event in events:
                if event.kind.startswith("model."):  # one may serve now that did not
                    self._woken.set()

    async def _watch(self) -> None:
        while True:
            if await asyncio.to_thread(self._hints.ensure):
                self._woken.set()
            if self._woken.is_set() or time.monotonic() >= self._next_look:
                self._woken.clear()
                await self._look_or_tell()
                self._next_look = time.monotonic() + self._interval()
            await self._pause()

    async def _pause(self) -> None:
        """Until there is something to look at; never longer than `poll_s`, so that the threads are supervised."""
        timeout = max(0.0, min(self._config.poll_s, self._next_look - time.monotonic()))
        waking = asyncio.create_task(self._woken.wait())
        try:
            # not `wait_for`: before Python 3.12 it loses a cancellation that comes in the moment of the waking
            await asyncio.wait({waking}, timeout=timeout)
        finally:
            waking.cancel()
        if self._woken.is_set():
            await asyncio.sleep(DEBOUNCE_S)

    def _interval(self) -> float:
        """Until the next look, if nothing asks for one before, in seconds."""
        if self._absence:
            return self._config.poll_s
        if self._files.moving or self._applier.awaits_moving_set or not self._has_settled(time.monotonic()):
            return max(self._config.settle_s, DEBOUNCE_S)
        if self._hints.polling or self._applier.awaits_other_set:
            return self._config.poll_s
        return self._config.rescan_s

    # Looking

    async def _look_or_tell(self) -> None:
        """One look; nothing that goes wrong with it ends the watching: the next look does what is left."""
        retries, self._retry_asked = self._retry_asked, False
        try:
            await self._look(retries)
        except Exception:
            self._retry_asked |= retries
            log.exception("looking at the watched directory failed", directory=str(self._directory))

    async def _look(self, retries: bool) -> None:
        if retries:
            self._applier.retry()
        try:
            files = await asyncio.to_thread(read_directory, self._directory)
        except OSError as error:
            self._note_absence(error.strerror or str(error))
        else:
            self._absence = ""
            await self._take_in(files, retries)
        now = time.monotonic()
        if self._has_settled(now):
            await self._applier.reconcile(now)

    async def _take_in(self, files: dict[str, FileState], retries: bool) -> None:
        now = time.monotonic()
        self._first_look = now if self._first_look is None else self._first_look
        self._waiting |= self._changed(files, now)
        if retries:
            self._waiting |= self._damaged
        for name in sorted(self._waiting - set(self._files.moving)):
            await self._take_or_tell(name, files.get(name))

    def _note_absence(self, reason: str) -> None:
        """A directory that is not there says nothing: what its files said last stays in effect."""
        self._files.start_over()
        if reason != self._absence:
            log.warning("waiting for the watched directory", directory=str(self._directory), reason=reason)
        self._absence = reason

    def _has_settled(self, now: float) -> bool:
        """After a start nothing is decided before the files that are there could settle."""
        return self._first_look is not None and now - self._first_look >= self._config.settle_s

    def _changed(self, files: dict[str, FileState], now: float) -> set[str]:
        identities = {name: state.identity for name, state in files.items()}
        held = {name for name, state in files.items() if state.is_being_written}
        for name in sorted(held - self._held):
            log.info("quant config is open for writing; waiting", file=shown(name))
        self._held = held
        return set(self._files.observe(now, identities, held))

    async def _take_or_tell(self, name: str, state: FileState | None) -> None:
        try:
            await self._take(name, state)
        except Exception:  # the other files are none the worse for it
            log.exception("quant config not taken in; it is tried again", file=shown(name))
        else:
            self._waiting.discard(name)

    async def _take(self, name: str, state: FileState | None) -> None:
        """Takes in a file that has settled; None: it has gone."""
        self._damaged.discard(name)
        if state is None:
            self._applier.drop_ins.remove(name)
            log.info("quant config removed", file=shown(name))
            return
        try:
            config = await asyncio.to_thread(_parse, name, state, self._directory)
        except ConfigError as error:
            self._damaged.add(name)
            self._applier.reject(self._applier.drop_ins.model_of(name), [name], _summary(error))
            return
        self._applier.drop_ins.put(name, state.text, config)
        log.info("quant config read", file=shown(name), model=config.model)

    async def _restore(self) -> None:
        state = await asyncio.to_thread(WatchState.read, self._state_file)
        settled = {}
        for name, text in state.texts.items():
            file = FileState.of(text)
            try:
                config = await asyncio.to_thread(_parse, name, file, self._directory)
            except ConfigError as error:
                log.error("kept quant config cannot be read any more", file=shown(name), reason=_summary(error))
                continue
            self._applier.drop_ins.put(name, text, config)
            settled[name] = file.identity
        self._files = Settling(self._config.settle_s, settled)
        self._applier.restore(state)


def _parse(name: str, state: FileState, directory: Path) -> QuantConfig:
    """Raises ConfigError, whatever is wrong with the file: one file never keeps the others from being read."""
    if state.problem:
        raise ConfigError([f"{shown(name)}: {state.problem}"])
    try:
        return quant_config.parse(state.text, shown(name), directory)
    except ConfigError:
        raise
    except Exception as error:
        log.exception("unexpected error in a quant config", file=shown(name))
        raise ConfigError([f"{shown(name)}: internal error ({type(error).__name__}); the log tells more"]) from error


def _summary(error: ConfigError) -> str:
    return "; ".join(error.lines)
