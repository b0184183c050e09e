"""A daemon that watches a directory, as a process of its own, and somebody who asks it all along what it answers."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.daemon_process import Client, DaemonProcess, daemon_process

from dskapi.v1 import control_pb2
from dskapi.v1.common_pb2 import PRECISION_MODE_INT4, PRECISION_MODE_INT8
from dskquant.store import DEFAULT_PARAMETER_SET

LIMIT_S = 120.0
PROMPT = "The lighthouse keeper"
TOKENS = 24
WATCH = {"settle_s": 0.05, "rescan_s": 600.0, "poll_s": 0.2}
"""A rescan would hide a change that no event told."""


@dataclass(frozen=True)
class WatchedDaemon:
    """A running daemon with one model."""

    process: DaemonProcess
    model: str
    store: Path
    directory: Path  # watched
    shelf: Path  # beside it: for parameter sets and what else the tests keep

    @property
    def default_set(self) -> Path:
        return self.store / DEFAULT_PARAMETER_SET

    def new_set(self, name: str, damage: Callable[[Path], object] = lambda _: None) -> Path:
        """A copy of the default set on the shelf, damaged."""
        directory = shutil.copytree(self.default_set, self.shelf / name)
        damage(directory)
        return directory

    def config(self, **tables: Any) -> str:
        """The text of a quant config for the model; a mapping becomes a section."""
        plain = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
        sections = {key: value for key, value in tables.items() if isinstance(value, Mapping)}
        lines = [f"{key} = {json.dumps(value)}" for key, value in {"model": self.model, **plain}.items()]
        for name, section in sections.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
        return "\n".join([*lines, ""])

    def config_of(self, directory: Path, **keys: Any) -> str:
        """A quant config that names a parameter set."""
        return self.config(params={"file": str(directory)}, **keys)

    def drop(self, name: str, content: str | bytes) -> None:
        """Puts a file into the watched directory the way tools do: written aside, then renamed."""
        aside = self.directory / f".{name}.aside"
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(self.directory / name)

    def clear(self) -> None:
        """Takes everything out of the watched directory."""
        for path in self.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextmanager
def watched_daemon(model: str, store: Path, table: Mapping[str, Any], **server: Any) -> Iterator[WatchedDaemon]:
    """Started, and expected to end in order with nothing in its log that was not meant."""
    tables = {model: {"path": str(store)}}
    for key, value in table.items():
        tables |= {f"{model}.{key}": value} if isinstance(value, Mapping) else {model: {**tables[model], key: value}}
    with daemon_process(tables, **server) as process:
        directory, shelf = process.folder / "quant.d", process.folder / "shelf"
        directory.mkdir()
        shelf.mkdir()
        lines = [f"{key} = {json.dumps(value)}" for key, value in {"directory": str(directory), **WATCH}.items()]
        with (process.folder / "dskd.toml").open("a", encoding="utf-8") as file:
            file.write("\n".join(["[watch]", *lines, ""]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(process.folder))
            process.start()
        yield WatchedDaemon(process, model, store, directory, shelf)
        assert process.stop() == 0
        if unexpected := [line for line in process.log_text.splitlines() if "Traceback" in line]:
            pytest.fail("\n".join(unexpected))


@dataclass(frozen=True)
class Portrait:
    """What a model serves with, and what it answers."""

    generation: int
    hash: str
    parameter_set: str
    answers: tuple[tuple[int, ...], ...]  # tokens in INT4 and in INT8
    labels: frozenset[int]  # generations that made the tokens


async def portrait(client: Client) -> Portrait:
    """Taken while nothing changes."""
    model = await client.model()
    answers = [
        await client.answer(PROMPT, TOKENS, precision=mode) for mode in (PRECISION_MODE_INT4, PRECISION_MODE_INT8)
    ]
    labels = frozenset(token.generation for answer in answers for token in answer.tokens)
    return Portrait(
        model.generation, model.hash, model.parameter_set, tuple(tuple(answer.ids) for answer in answers), labels
    )


@asynccontextmanager
async def unmoved(client: Client) -> AsyncIterator[Portrait]:
    """Asks again and again meanwhile; every answer must be the one of before, made by the generation of before."""
    before = await portrait(client)
    assert before.labels == {before.generation}
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            began = time.monotonic()
            assert await portrait(client) == before
            with suppress(asyncio.TimeoutError):  # a build waits for idle cores: it gets them half of the time
                await asyncio.wait_for(over.wait(), time.monotonic() - began)

    asking = asyncio.create_task(ask())
    try:
        yield before
    finally:
        over.set()
        await asking
    assert await portrait(client) == before


class Outcomes:
    """How changes ended, as the events tell it."""

    def __init__(self, events: AsyncIterator[control_pb2.Event]) -> None:
        self._events = events

    async def of(self, actor: str) -> control_pb2.Event:
        """The next end of a change by `actor`, which may be a shell pattern."""
        return await asyncio.wait_for(self._next(actor), LIMIT_S)

    async def reason(self, file: str) -> str:
        """Why the config in `file` was refused."""
        event = await self.of(f"watch:{file}")
        assert event.kind == "apply.rejected", event.message
        return event.message

    async def generation(self, file: str) -> int:
        """The generation that the config in `file` has led to."""
        event = await self.of(f"watch:{file}")
        assert event.kind == "apply.committed", event.message
        return int(event.fields["generation"])

    async def until(self, actor: str, is_reached: Callable[[int], bool]) -> None:
        """Until a change by `actor` has led to a generation that will do."""
        while True:
            event = await self.of(actor)
            if event.kind == "apply.committed" and is_reached(int(event.fields["generation"])):
                return

    async def _next(self, actor: str) -> control_pb2.Event:
        async for event in self._events:
            if event.kind.startswith("apply.") and fnmatch.fnmatchcase(event.fields["actor"], actor):
                return event
        raise AssertionError("the events ended")
