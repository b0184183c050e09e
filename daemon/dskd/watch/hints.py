"""Hints that something in a directory may have changed, from the kernel by way of watchdog's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import structlog
from watchdog.events import (
    EVENT_TYPE_CLOSED_NO_WRITE,
    EVENT_TYPE_DELETED,
    EVENT_TYPE_OPENED,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.utils import BaseThread

READS = (EVENT_TYPE_OPENED, EVENT_TYPE_CLOSED_NO_WRITE)
"""Events that reading causes: a hint to read again would never end."""

REMEDY = "raise the sysctls fs.inotify.max_user_watches and fs.inotify.max_user_instances, then send SIGHUP"

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


class Hints(FileSystemEventHandler):
    """Calls `notify`, on a thread of its own, whenever something in the directory or below it may have changed.

    It does so from the first `ensure` on, which has to be called now and then: it follows the directory when that
    comes, goes or is replaced, and replaces threads that died. May be used from any thread.
    """

    def __init__(self, directory: Path, notify: Callable[[], None], polling: bool) -> None:
        self._directory = directory
        self._notify = notify
        self._wants_polling = polling
        self._polling = polling
        self._lock = threading.Lock()
        self._observer: BaseObserver | None = None
        self._threads: set[threading.Thread] = set()
        self._root = ""  # what the observer watches: the directory, links followed
        self._place: tuple[int, int] | None = None  # its device and inode
        self._closed = False

    @property
    def polling(self) -> bool:
        """No hints come: it was asked for, or the kernel's means are exhausted."""
        return self._polling

    def reconsider(self) -> None:
        """The next `ensure` tries again what the kernel refused before."""
        self._polling = self._wants_polling

    def ensure(self) -> bool:
        """Gets the directory watched, if it is there; True when it was not watched a moment ago."""
        with self._lock:
            if self._polling or self._closed:
                return False
            place = _place(self._directory)
            is_same = place is not None and place == self._place
            if is_same and self._is_alive():
                return False
            if is_same:
                log.error("a thread that watches died; starting again", directory=str(self._directory))
            self._stop()
            return place is not None and self._start(place)

    def close(self) -> None:
        """Ends the threads, and waits until they have ended. No hint comes afterwards."""
        with self._lock:
            self._closed = True
            self._stop()

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.event_type == EVENT_TYPE_DELETED and event.src_path == self._root:
            self._place = None  # whatever is there next is another one, even with the same inode
        if event.event_type not in READS:
            self._notify()

    def _is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def _start(self, place: tuple[int, int]) -> bool:
        others = _watchdog_threads()
        try:
            self._observer = self._watching_observer()
        except (FileNotFoundError, NotADirectoryError):  # it went away this moment
            return False
        except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
            self._polling = True
            log.warning("polling the watched directory", directory=str(self._directory), reason=str(error), hint=REMEDY)
            return False
        self._threads = _watchdog_threads() - others
        self._place = place
        return True

    def _watching_observer(self) -> BaseObserver:
        observer = Observer()
        try:
            self._root = str(self._directory.resolve())  # watchdog does not follow links
            observer.schedule(self, self._root, recursive=True)
            observer.start()
        except BaseException:
            observer.stop()
            raise
        return observer

    def _stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            for thread in self._threads:
                thread.join()
        self._observer, self._threads, self._place = None, set(), None


def _watchdog_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, BaseThread)}


def _place(directory: Path) -> tuple[int, int] | None:
    try:
        status = directory.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
