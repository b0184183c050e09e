"""How a change of a model is waited for, and what is said of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress

import grpc
from rich.console import Group, RenderableType

from dskapi.v1.control_pb2 import ChangeResponse, Event, WatchEventsRequest
from dskctl.daemon import Daemon
from dskctl.printer import Printer, Tell
from dskctl.tables import facts
from dskctl.words import (
    duration_words,
    flip_words,
    generation_word,
    mode_word,
    moved,
    phase_words,
    proof_facts,
    short_hash,
)


def awaited(change: Callable[[], ChangeResponse], line: str, daemon: Daemon, printer: Printer) -> ChangeResponse:
    """The outcome of `change`; a terminal shows what the daemon does meanwhile. Raises grpc.RpcError."""
    with printer.waiting(line) as tell:
        if tell:
            events = daemon.watch_events(WatchEventsRequest())
            threading.Thread(target=_tell_events, args=(events, tell), daemon=True).start()
        return change()


def _tell_events(events: Generator[Event, None, None], tell: Tell) -> None:
    """Ends with the channel, which may be closed already. An error is not for here: the change itself meets it too."""
    with suppress(grpc.RpcError, ValueError), closing(events):
        for event in events:
            tell(f"{event.model}: {event.message}")


def as_text(response: ChangeResponse) -> RenderableType:
    """What serves now, and how the change went."""
    if not response.changed:
        return (
            f"{response.model}: already serving: generation {response.to_generation}, "
            f"{mode_word(response.to_mode)}, parameter set {short_hash(response.parameter_set)}"
        )
    if not response.done:
        return Group(f"{response.model}: goes on in the background; `dskctl watch` tells how it ends", _facts(response))
    return _facts(response)


def as_trial(response: ChangeResponse) -> RenderableType:
    """What would be changed (dry run)."""
    if not response.changed:
        return as_text(response)
    return Group("dry run: nothing was changed; this is what would be", _facts(response))


def _facts(response: ChangeResponse) -> RenderableType:
    generations = moved(generation_word(response.from_generation), generation_word(response.to_generation))
    return facts(
        [
            ("model", response.model),
            ("generation", generations),
            ("mode", moved(mode_word(response.from_mode), mode_word(response.to_mode))),
            ("parameter set", short_hash(response.parameter_set)),
            *proof_facts(response.proofs),
            ("phases", phase_words(response.phases_ms)),
            ("flip", flip_words(response.flip_us)),
            ("total", duration_words(response.total_ms) if response.total_ms else ""),
        ]
    )
