"""The watcher at work: real files, real kernel events (and polling), a target that records what it is asked to do."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import io
import os
import queue
import random
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from watchdog.events import FileSystemEvent
from watchdog.observers.api import EventDispatcher
from watchdog.observers.inotify_c import InotifyFD
from watchdog.utils import BaseThread

from dskd import quant_config
from dskd.config import WatchConfig
from dskd.engine.request import InFlight
from dskd.errors import FailedPreconditionError, UnavailableError
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.types import Change, ChangeReport, HistoryEntry, SetReference
from dskd.quant_config import QuantConfig
from dskd.watch import Watcher
from dskd.watch.hints import Hints
from dskd.watch.scan import read_directory
from dskquant.errors import ParameterSetMissingError
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
INT8_CONFIG = 'model = "a"\nprecision = "int8"\n'
FP32_CONFIG = 'model = "a"\nprecision = "fp32"\n'
RULE = '[[layers]]\nmatch = "layer.{}"\nprecision = "int8"\n'
LIMIT_S = 20.0
REPORT = ChangeReport(1, 2, INT4, INT4, "", "", changed=True, done=True)


LogLines = list[MutableMapping[str, Any]]


@dataclass(frozen=True)
class Call:
    """One call of `Target.apply`."""

    model: str
    change: Change
    actor: str


class FakeTarget:
    """Records calls of `apply`; `answer` decides how each ends."""

    def __init__(self, *names: str) -> None:
        self.known = set(names)
        self.unloaded: set[str] = set()
        self.calls: list[Call] = []
        self.answer: Callable[[Call], Awaitable[None]] = accept
        self._called = asyncio.Event()

    def names(self) -> set[str]:
        return self.known

    def default_mode(self, model: str) -> PrecisionMode:
        assert model in self.known
        return INT4

    def is_serving(self, model: str) -> bool:
        assert model in self.known
        return model not in self.unloaded

    async def apply(self, model: str, change: Change, actor: str) -> ChangeReport:
        call = Call(model, change, actor)
        self.calls.append(call)
        self._called.set()
        await self.answer(call)
        return REPORT

    async def next_call(self, number: int) -> Call:
        """The `number`th call, 1 the first; waits for it."""
        while len(self.calls) < number:
            self._called.clear()
            await asyncio.wait_for(self._called.wait(), LIMIT_S)
        return self.calls[number - 1]


async def accept(call: Call) -> None:
    return


@dataclass
class Watching:
    """A running watcher and everything around it."""

    directory: Path
    config: WatchConfig
    state_file: Path
    target: FakeTarget = field(default_factory=lambda: FakeTarget("a", "b", "marker"))
    history: History = field(default_factory=History)
    events: EventBus = field(default_factory=EventBus)
    markers: int = 0

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Watcher]:
        watcher = Watcher(self.config, self.state_file, self.target, self.history, self.events)
        running = asyncio.create_task(watcher.run())
        try:
            yield watcher
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text, encoding="utf-8")

    async def settled(self) -> None:
        """Waits until the watcher has taken in whatever was written before."""
        self.markers += 1
        self.write("marker.toml", 'model = "marker"\n' + RULE.format(f"marker.{self.markers}"))
        change = Change(layers=(LayerRule(f"layer.marker.{self.markers}", INT8),))
        while Call("marker", change, "watch:marker.toml") not in self.target.calls:
            await self.target.next_call(len(self.target.calls) + 1)

    @property
    def calls(self) -> list[Call]:
        """All but those of the marker."""
        return [call for call in self.target.calls if call.model != "marker"]

    @property
    def changes(self) -> list[Change]:
        return [call.change for call in self.calls]

    @property
    def rejections(self) -> list[str]:
        """Reasons, oldest first."""
        return [entry.reason for entry in reversed(self.history.newest(None, 100))]

    async def rejected(self, count: int) -> list[str]:
        with self.events.subscribe() as events:
            arriving = aiter(events)
            while len(self.rejections) < count:
                await asyncio.wait_for(anext(arriving), LIMIT_S)
        return self.rejections


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine function in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


@pytest.fixture(params=["events", "polling"])
def watching(request: pytest.FixtureRequest, tmp_path: Path) -> Watching:
    directory = tmp_path / "quant.d"
    directory.mkdir()
    config = WatchConfig(directory, settle_s=0.1, rescan_s=1000.0, polling=request.param == "polling", poll_s=0.1)
    return Watching(directory, config, tmp_path / "state" / "watch.json")


@pytest.fixture
def log_lines() -> Iterator[LogLines]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def watchdog_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, BaseThread)]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def grants_leases(folder: Path) -> bool:
    path = folder / "probe"
    path.touch()
    with path.open("rb") as reader, suppress(OSError):
        fcntl.fcntl(reader.fileno(), fcntl.F_SETLEASE, fcntl.F_RDLCK)
        return True
    return False


@asynchronous
async def test_a_dropped_file_is_applied(watching: Watching) -> None:
    async with watching.run():
        watching.write("10-a.toml", INT8_CONFIG)
        assert await watching.target.next_call(1) == Call("a", Change(mode=INT8), "watch:10-a.toml")


@asynchronous
async def test_files_that_were_there_before_are_applied_together(watching: Watching) -> None:
    watching.write("20.toml", INT8_CONFIG + 'in_flight = "finish"\n')
    watching.write("10.toml", FP32_CONFIG + '[params]\nfile = "set"\n' + RULE.format(1))
    async with watching.run():
        assert await watching.target.next_call(1) == Call(
            "a",
            Change(
                INT8,
                SetReference(watching.directory / "set"),
                (LayerRule("layer.1", INT8),),
                InFlight.FINISH,
            ),
            "watch:10.toml,20.toml",
        )


@asynchronous
async def test_a_removed_file_is_taken_back(watching: Watching) -> None:
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        (watching.directory / "x.toml").unlink()
        assert await watching.target.next_call(2) == Call("a", Change(mode=INT4), "watch:x.toml")


@asynchronous
async def test_watching_ends_though_a_file_changes_in_the_moment_of_the_cancellation(watching: Watching) -> None:
    watcher = Watcher(watching.config, watching.state_file, watching.target, watching.history, watching.events)
    running = asyncio.create_task(watcher.run())
    watching.write("x.toml", INT8_CONFIG)
    await watching.target.next_call(1)
    for _ in range(20):  # wherever it may be by then
        await asyncio.sleep(0)
    watcher.rescan()
    await asyncio.sleep(0)  # it is told that it is woken, and has not seen it yet
    running.cancel()
    await asyncio.wait({running}, timeout=LIMIT_S)
    assert running.cancelled()


@asynchronous
async def test_the_same_content_written_again_changes_nothing(watching: Watching) -> None:
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        os.utime(watching.directory / "x.toml")
        watching.write("x.toml", INT8_CONFIG)
        await watching.settled()
        assert watching.changes == [Change(mode=INT8)]


@asynchronous
async def test_another_content_counts_whatever_its_time(watching: Watching) -> None:
    path = watching.directory / "x.toml"
    watching.write("x.toml", INT8_CONFIG)
    status = path.stat()
    async with watching.run():
        await watching.target.next_call(1)
        watching.write("x.toml", FP32_CONFIG)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (await watching.target.next_call(2)).change == Change(mode=FP32)


@asynchronous
async def test_a_file_written_slowly_in_pieces_is_applied_once_and_whole(watching: Watching, tmp_path: Path) -> None:
    if not grants_leases(tmp_path):
        pytest.skip("no leases on this filesystem")
    pieces = [INT8_CONFIG, *(RULE.format(number) for number in range(5))]
    async with watching.run():
        with (watching.directory / "x.toml").open("w") as file:
            for piece in pieces:
                file.write(piece)
                file.flush()  # whole TOML each time, and it rests longer than it takes to settle
                await watching.settled()
            assert watching.changes == []
        await watching.target.next_call(len(pieces) + 1)
        await watching.settled()
    (change,) = watching.changes
    assert change.mode is INT8
    assert change.layers is not None
    assert [rule.match for rule in change.layers] == [f"layer.{number}" for number in range(5)]


@asynchronous
async def test_ten_thousand_lines_written_by_a_thread_are_applied_once_and_whole(
    watching: Watching, tmp_path: Path
) -> None:
    if not grants_leases(tmp_path):
        pytest.skip("no leases on this filesystem")

    def write() -> None:
        with (watching.directory / "x.toml").open("w") as file:
            file.write(INT8_CONFIG)
            for number in range(3_333):
                file.write(RULE.format(number))
                file.flush()

    async with watching.run():
        await asyncio.to_thread(write)
        await watching.target.next_call(1)
        await watching.settled()
    (change,) = watching.changes
    assert change.layers is not None
    assert len(change.layers) == 3_333


@asynchronous
async def test_a_volume_of_kubernetes_is_followed_through_its_swaps(watching: Watching) -> None:
    def mount(version: str, text: str) -> None:
        """As the kubelet does: the names of the files stay the same links all along."""
        folder = watching.directory / f"..{version}"
        folder.mkdir()
        (folder / "x.toml").write_text(text)
        aside = watching.directory / "..data_tmp"
        aside.symlink_to(folder.name)
        aside.replace(watching.directory / "..data")

    mount("2026_01", INT8_CONFIG)
    (watching.directory / "x.toml").symlink_to("..data/x.toml")
    async with watching.run():
        assert (await watching.target.next_call(1)).change == Change(mode=INT8)
        mount("2026_02", FP32_CONFIG)
        assert await watching.target.next_call(2) == Call("a", Change(mode=FP32), "watch:x.toml")
        shutil.rmtree(watching.directory / "..2026_01")
        await watching.settled()
        assert watching.changes == [Change(mode=INT8), Change(mode=FP32)]


@asynchronous
async def test_a_storm_of_renames_ends_with_the_last_content(watching: Watching) -> None:
    path, other, aside = (watching.directory / name for name in ("x.toml", "y.toml", ".x.toml.new"))

    def storm() -> None:
        for number in range(500):
            aside.write_text(FP32_CONFIG if number % 2 else INT8_CONFIG)
            aside.replace(path)
            path.rename(other)
            other.rename(path)
        watching.write("last.toml", INT8_CONFIG + RULE.format("last"))
        path.unlink()

    async with watching.run():
        await asyncio.to_thread(storm)
        await watching.settled()
        last = watching.changes[-1]
    assert last.layers == (LayerRule("layer.last", INT8),)
    assert len(watching.changes) < 20  # far fewer than there were contents
    assert watching.rejections == []


@asynchronous
async def test_files_of_editors_are_ignored(watching: Watching) -> None:
    for name in (".x.toml", "#x.toml#", "x.toml~", ".x.toml.swp", "4913", "x.toml.new"):
        watching.write(name, INT8_CONFIG)
    (watching.directory / ".#x.toml").symlink_to("user@host.1")
    async with watching.run():
        await watching.settled()
    assert watching.calls == []
    assert watching.rejections == []


@asynchronous
async def test_each_file_that_cannot_be_used_is_refused_by_name_once(watching: Watching) -> None:
    watching.write("mistake.toml", 'model = "a"\nprecison = "int8"')
    watching.write("unknown.toml", 'model = "c"')
    watching.write("large.toml", "#" * (1 << 20) + "\n")
    (watching.directory / "bytes.toml").write_bytes(b"\xff")
    (watching.directory / "folder.toml").mkdir()
    (watching.directory / "loop.toml").symlink_to("loop.toml")
    os.mkfifo(watching.directory / "fifo.toml")
    watching.write("good.toml", INT8_CONFIG)
    async with watching.run():
        await watching.rejected(7)
        await watching.settled()
    assert sorted(watching.rejections) == [
        "bytes.toml: is not UTF-8: byte 0",
        "fifo.toml: cannot be read: it is a FIFO",
        "folder.toml: cannot be read: it is a directory",
        "large.toml: has more than 512.0 KiB",
        "loop.toml: cannot be read: Too many levels of symbolic links",
        "mistake.toml: precison: unknown key; did you mean 'precision'?",
        "unknown.toml: no model 'c'; known: a, b, marker",
    ]
    assert watching.changes == [Change(mode=INT8)]
    entry = next(entry for entry in watching.history.newest("c", 1))
    expected = HistoryEntry(
        "c", "apply", "watch:unknown.toml", "rejected", "unknown.toml: no model 'c'; known: a, b, marker"
    )
    assert entry == replace(expected, time=entry.time, id=entry.id, sequence=entry.sequence)


@asynchronous
async def test_a_file_that_breaks_its_reader_is_refused_and_harms_no_other(
    watching: Watching, monkeypatch: pytest.MonkeyPatch, log_lines: LogLines
) -> None:
    def parse(text: str, *rest: Any) -> QuantConfig:
        return quant_config_parse(text, *rest) if "broken" not in text else float(10**400)  # type: ignore[return-value]

    quant_config_parse = quant_config.parse
    monkeypatch.setattr(quant_config, "parse", parse)
    watching.write("a.toml", "broken")
    watching.write("b.toml", INT8_CONFIG)
    async with watching.run():
        assert await watching.target.next_call(1) == Call("a", Change(mode=INT8), "watch:b.toml")
    assert watching.rejections == ["a.toml: internal error (OverflowError); the log tells more"]
    assert [line["file"] for line in log_lines if line.get("exc_info")] == ["a.toml"]


@asynchronous
async def test_what_one_look_failed_to_do_the_next_one_does(
    watching: Watching, monkeypatch: pytest.MonkeyPatch, log_lines: LogLines
) -> None:
    append, failures = watching.history.append, [RuntimeError("no history")]

    def fail_once(entry: HistoryEntry) -> HistoryEntry:
        if failures:
            raise failures.pop()
        return append(entry)

    monkeypatch.setattr(watching.history, "append", fail_once)
    watching.write("a.toml", "broken")
    watching.write("b.toml", INT8_CONFIG)
    async with watching.run() as watcher:
        assert await watching.target.next_call(1) == Call("a", Change(mode=INT8), "watch:b.toml")
        watcher.rescan()
        assert len(await watching.rejected(1)) == 1
    assert [line["file"] for line in log_lines if line.get("exc_info")] == ["a.toml"]


@asynchronous
async def test_a_damaged_file_keeps_its_last_good_content_until_it_is_mended(watching: Watching) -> None:
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        watching.write("x.toml", "model = ")
        assert (await watching.rejected(1))[0].startswith("x.toml: Invalid value")
        assert watching.history.newest("a", 1)[0].actor == "watch:x.toml"
        await watching.settled()
        assert len(watching.calls) == 1
        watching.write("x.toml", FP32_CONFIG)
        await watching.settled()
        assert watching.changes == [Change(mode=INT8), Change(mode=FP32)]


@asynchronous
async def test_a_damaged_file_keeps_its_last_good_content_over_a_restart_until_it_is_removed(
    watching: Watching,
) -> None:
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        await watching.settled()
    watching.write("x.toml", "model = ")
    async with watching.run():
        await watching.rejected(1)
        await watching.settled()
        assert watching.changes == [Change(mode=INT8)]
        (watching.directory / "x.toml").unlink()
        await watching.settled()
        assert watching.changes == [Change(mode=INT8), Change(mode=INT4)]


@asynchronous
async def test_a_restart_applies_only_what_changed_meanwhile(watching: Watching) -> None:
    watching.write("a.toml", INT8_CONFIG)
    watching.write("b.toml", 'model = "b"\nprecision = "int8"\n' + RULE.format(1))
    watching.write("b2.toml", 'model = "b"\nprecision = "fp32"\n')
    async with watching.run():
        await watching.target.next_call(2)
        await watching.settled()
    watching.target.calls.clear()
    (watching.directory / "b2.toml").unlink()
    async with watching.run():
        assert await watching.target.next_call(1) == Call("b", Change(mode=INT8), "watch:b.toml")
        await watching.settled()
        assert len(watching.calls) == 1


@asynchronous
async def test_nothing_is_tried_after_a_restart_before_the_files_could_settle(watching: Watching) -> None:
    async def refuse(call: Call) -> None:
        if call.model == "a":
            raise FailedPreconditionError("memory", "does not fit")

    watching.target.answer = refuse
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        await watching.settled()
    watching.write("x.toml", FP32_CONFIG)
    async with watching.run():
        await watching.settled()
        assert watching.changes == [Change(mode=INT8), Change(mode=FP32)]


@asynchronous
async def test_files_removed_while_the_daemon_was_down_are_taken_back(watching: Watching) -> None:
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        await watching.settled()
    (watching.directory / "x.toml").unlink()
    async with watching.run():
        await watching.settled()
        assert watching.calls[1:] == [Call("a", Change(mode=INT4), "watch:x.toml")]


@asynchronous
async def test_damaged_state_means_that_everything_is_applied_anew(watching: Watching) -> None:
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        await watching.settled()
    watching.state_file.write_text("{")
    async with watching.run():
        await watching.settled()
        assert watching.changes == [Change(mode=INT8)] * 2


@asynchronous
async def test_a_set_that_arrives_after_its_config_is_applied_when_it_is_there(watching: Watching) -> None:
    folder = watching.directory / "sets" / "new"
    there = asyncio.get_running_loop().create_future()

    async def answer(call: Call) -> None:
        if call.model == "a" and not (folder / "manifest.json").exists():
            raise ParameterSetMissingError(f"{folder}: missing")
        if call.model == "a":
            there.set_result(call)

    watching.target.answer = answer
    watching.write("x.toml", 'model = "a"\n[params]\nfile = "sets/new"')
    async with watching.run():
        await watching.target.next_call(1)
        await watching.settled()
        assert len(watching.calls) == 1
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        await there
        await watching.settled()
        assert watching.changes == [Change(parameters=SetReference(folder))] * len(watching.changes)
    assert watching.rejections == []  # the manager records what it refuses


@asynchronous
async def test_what_was_refused_is_tried_and_told_again_when_asked(watching: Watching) -> None:
    async def refuse(call: Call) -> None:
        if call.model == "a":
            raise FailedPreconditionError("memory", "does not fit")

    watching.target.answer = refuse
    watching.write("x.toml", INT8_CONFIG)
    watching.write("y.toml", "model = ")
    async with watching.run() as watcher:
        await watching.rejected(1)
        await watching.settled()
        assert len(watching.calls) == 1
        await asyncio.to_thread(watcher.rescan)
        await watching.rejected(2)
        await watching.settled()
        assert watching.changes == [Change(mode=INT8)] * 2
        assert len(watching.rejections) == 2


@asynchronous
async def test_a_model_is_given_its_config_when_it_serves(watching: Watching) -> None:
    watching.target.unloaded = {"a"}
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.settled()
        assert watching.calls == []
        watching.target.unloaded = set()
        watching.events.publish("model.serving", "a", "")
        await watching.target.next_call(2)
        assert watching.changes == [Change(mode=INT8)]


@asynchronous
async def test_what_an_unload_interrupted_is_applied_after_the_next_load(watching: Watching) -> None:
    async def unload(call: Call) -> None:
        watching.target.unloaded = {"a"}
        raise UnavailableError("the model is being unloaded")

    watching.target.answer = unload
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        watching.target.answer = accept
        await watching.settled()
        assert len(watching.calls) == 1
        watching.target.unloaded = set()
        watching.events.publish("model.serving", "a", "")
        await watching.settled()
        assert watching.changes == [Change(mode=INT8)] * 2


@asynchronous
async def test_a_model_that_becomes_known_is_given_its_config(watching: Watching) -> None:
    watching.write("x.toml", 'model = "late"\nprecision = "int8"')
    async with watching.run():
        await watching.rejected(1)
        watching.target.known.add("late")
        watching.events.publish("model.serving", "late", "")
        assert (await watching.target.next_call(1)).model == "late"


@asynchronous
async def test_a_model_that_vanishes_while_it_is_changed_is_given_its_config_when_it_is_back(
    watching: Watching,
) -> None:
    async def vanish(call: Call) -> None:
        if call.model == "a":
            watching.target.known.discard("a")
            raise UnavailableError("gone")

    watching.target.answer = vanish
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.rejected(1)
        watching.target.answer = accept
        watching.target.known.add("a")
        watching.events.publish("model.serving", "a", "")
        await watching.settled()
    assert watching.rejections == ["x.toml: no model 'a'; known: b, marker"]
    assert watching.changes == [Change(mode=INT8)] * 2


@asynchronous
async def test_a_slow_build_of_one_model_does_not_hold_up_another(watching: Watching) -> None:
    built = asyncio.Event()

    async def build(call: Call) -> None:
        if call.model == "a":
            await built.wait()

    watching.target.answer = build
    watching.write("a.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        watching.write("b.toml", INT8_CONFIG.replace('"a"', '"b"'))
        await watching.settled()
        assert [call.model for call in watching.calls] == ["a", "b"]
        built.set()
        await watching.settled()
        assert len(watching.calls) == 2


@asynchronous
async def test_a_newer_content_overtakes_what_is_being_built(watching: Watching) -> None:
    overtaken: dict[str, asyncio.Event] = {}

    async def build(call: Call) -> None:
        """As the manager does: the newest change of a model wins, the one under way is refused."""
        if call.model == "marker":
            return
        if call.model in overtaken:
            overtaken.pop(call.model).set()
            return
        overtaken[call.model] = asyncio.Event()
        await overtaken[call.model].wait()
        raise FailedPreconditionError("change", "overtaken by a newer change")

    watching.target.answer = build
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        watching.write("x.toml", FP32_CONFIG)
        await watching.target.next_call(2)
        await watching.settled()
        assert watching.changes == [Change(mode=INT8), Change(mode=FP32)]
        (watching.directory / "x.toml").unlink()
        watching.target.answer = accept
        await watching.settled()
        assert watching.changes[2:] == [Change(mode=INT4)]  # so FP32 counted as applied


@asynchronous
async def test_a_failure_nobody_expected_does_not_end_the_watching(watching: Watching, log_lines: LogLines) -> None:
    async def fail(call: Call) -> None:
        if call.model == "a":
            raise ZeroDivisionError("surprise")

    watching.target.answer = fail
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.target.next_call(1)
        await watching.settled()
    (line,) = (line for line in log_lines if line["event"] == "quant config not applied")
    assert isinstance(line["exc_info"], ZeroDivisionError)


@asynchronous
async def test_the_directory_may_come_late_go_and_come_back(watching: Watching, log_lines: LogLines) -> None:
    watching.directory.rmdir()
    async with watching.run():
        watching.directory.mkdir()
        watching.write("x.toml", INT8_CONFIG)
        await watching.target.next_call(1)
        shutil.rmtree(watching.directory)
        watching.directory.mkdir()
        watching.write("x.toml", FP32_CONFIG)
        while Change(mode=FP32) not in watching.changes:
            await watching.target.next_call(len(watching.target.calls) + 1)
    assert not any(line["log_level"] == "error" for line in log_lines)


@asynchronous
async def test_a_directory_that_is_not_there_takes_nothing_back(watching: Watching) -> None:
    watching.write("x.toml", INT8_CONFIG)
    aside = watching.directory.with_name("aside")
    async with watching.run():
        await watching.target.next_call(1)
        await watching.settled()
        watching.directory.rename(aside)
    async with watching.run():
        aside.rename(watching.directory)
        await watching.settled()
        assert watching.changes == [Change(mode=INT8)]


@asynchronous
async def test_what_its_files_said_last_holds_while_the_directory_is_away(watching: Watching) -> None:
    watching.target.unloaded = {"a"}
    watching.write("x.toml", INT8_CONFIG)
    async with watching.run():
        await watching.settled()
        watching.directory.rename(watching.directory.with_name("aside"))
        watching.target.unloaded = set()
        watching.events.publish("model.serving", "a", "")
        await watching.target.next_call(2)
        assert watching.changes == [Change(mode=INT8)]


@asynchronous
async def test_a_directory_behind_a_link_is_watched(watching: Watching, tmp_path: Path) -> None:
    real = watching.directory.rename(tmp_path / "real")
    watching.directory.symlink_to(real)
    async with watching.run():
        await watching.settled()


@asynchronous
async def test_the_watched_directory_is_never_written_to(watching: Watching) -> None:
    watching.write("x.toml", INT8_CONFIG)
    watching.write("y.toml", "model = ")
    before = {path: path.stat() for path in (watching.directory, *watching.directory.iterdir())}
    async with watching.run():
        await watching.target.next_call(1)
        await watching.rejected(1)
    after = {path: path.stat() for path in (watching.directory, *watching.directory.iterdir())}
    assert {path: (status.st_mtime_ns, status.st_ctime_ns) for path, status in after.items()} == {
        path: (status.st_mtime_ns, status.st_ctime_ns) for path, status in before.items()
    }


@asynchronous
async def test_state_that_cannot_be_kept_is_told_and_holds_nothing_up(watching: Watching, log_lines: LogLines) -> None:
    watching.state_file.parent.write_text("in the way")
    async with watching.run():
        await watching.settled()
    assert any(line["event"] == "state of the watcher not kept" for line in log_lines)


@asynchronous
async def test_the_end_leaves_no_threads_tasks_or_descriptors(watching: Watching) -> None:
    never = asyncio.Event()

    async def build(call: Call) -> None:
        if call.model == "a":
            await never.wait()

    watching.target.answer = build
    watching.write("x.toml", INT8_CONFIG)
    tasks = asyncio.all_tasks()
    async with watching.run() as watcher:
        await watching.settled()
        assert {"apply a", "watch models"} < {task.get_name() for task in asyncio.all_tasks() - tasks}
    assert asyncio.all_tasks() == tasks
    assert watchdog_threads() == []
    descriptors = open_descriptors()
    async with watching.run():
        await watching.settled()
    assert open_descriptors() == descriptors
    watcher.rescan()  # too late, and harmless


# Kernel events alone


@pytest.fixture
def by_events(tmp_path: Path) -> Watching:
    directory = tmp_path / "quant.d"
    directory.mkdir()
    config = WatchConfig(directory, settle_s=0.1, rescan_s=1000.0, poll_s=0.1)
    return Watching(directory, config, tmp_path / "watch.json")


def test_reading_the_files_is_no_reason_to_read_them_again(tmp_path: Path) -> None:
    seen: queue.Queue[tuple[str, bool]] = queue.Queue()

    class Recording(Hints):
        def on_any_event(self, event: FileSystemEvent) -> None:
            hints.clear()
            super().on_any_event(event)
            seen.put((Path(str(event.src_path)).name, bool(hints)))

    hints: list[None] = []
    (tmp_path / "x.toml").write_text(INT8_CONFIG)
    watched = Recording(tmp_path, lambda: hints.append(None), polling=False)
    assert watched.ensure()
    read_directory(tmp_path)
    (tmp_path / "y.toml").touch()
    told = list(iter(lambda: seen.get(timeout=LIMIT_S), ("y.toml", True)))  # in the order in which they happened
    watched.close()
    assert ("x.toml", False) in told
    assert ("x.toml", True) not in told


def test_hints_come_through_a_link_to_the_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    hints: queue.Queue[None] = queue.Queue()
    watched = Hints(link, lambda: hints.put(None), polling=False)
    assert watched.ensure()
    (tmp_path / "real" / "x.toml").touch()
    hints.get(timeout=LIMIT_S)
    watched.close()


@pytest.mark.parametrize("kind", [InotifyFD, EventDispatcher])
@asynchronous
async def test_a_thread_that_dies_is_replaced_loudly(
    by_events: Watching, log_lines: LogLines, kind: type[BaseThread]
) -> None:
    async with by_events.run():
        await by_events.settled()
        for thread in watchdog_threads():
            if isinstance(thread, kind):
                thread.stop()
        await by_events.settled()
    assert any("died" in line["event"] and line["log_level"] == "error" for line in log_lines)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
@asynchronous
async def test_without_kernel_events_it_polls_and_says_what_to_raise(
    by_events: Watching, log_lines: LogLines, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def exhausted(*_: object) -> None:
        raise OSError(number, "inotify limit reached")

    with monkeypatch.context() as patch:
        patch.setattr(InotifyFD, "add_callback" if number == errno.ENOSPC else "_create_inotify_fd", exhausted)
        async with by_events.run() as watcher:
            await by_events.settled()
            (line,) = (line for line in log_lines if line["log_level"] == "warning")
            assert "fs.inotify.max_user_watches" in line["hint"]
            assert "fs.inotify.max_user_instances" in line["hint"]
            assert watchdog_threads() == []
            patch.undo()
            watcher.rescan()
            await by_events.settled()
            assert watchdog_threads() != []


@asynchronous
async def test_changes_nobody_told_of_are_found_by_the_periodic_look(
    by_events: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_events.config = replace(by_events.config, rescan_s=0.2)
    monkeypatch.setattr("dskd.watch.hints.Hints.on_any_event", lambda *_: None)
    async with by_events.run():
        await by_events.settled()
        await by_events.settled()


# Everything at once


class Monkey:
    """Does to a directory what people, editors, tools and accidents do to it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._random = random.Random(seed)

    def play(self, turns: int) -> None:
        acts = (self.write, self.replace, self.damage, self.rename, self.remove, self.link, self.touch, self.block)
        for _ in range(turns):
            with suppress(OSError):  # what an earlier act left is in the way
                self._random.choice(acts)()

    def path(self) -> Path:
        return self._directory / f"{self._random.randrange(4)}.toml"

    def text(self) -> str:
        model, mode = self._random.choice("ab"), self._random.choice(["int4", "int8", "fp32"])
        params = f'[params]\nfile = "{self._random.randrange(3)}"\n' * self._random.randrange(2)
        rules = "".join(RULE.format(self._random.randrange(9)) for _ in range(self._random.randrange(3)))
        return f'model = "{model}"\nprecision = "{mode}"\n{params}{rules}'

    def write(self) -> None:
        with open_without_waiting(self.path()) as file:
            for character in self.text():
                file.write(character.encode())

    def replace(self) -> None:
        aside = self._directory / ".aside.toml"
        aside.write_text(self.text())
        aside.replace(self.path())

    def damage(self) -> None:
        with open_without_waiting(self.path()) as file:
            file.write(self._random.randbytes(100))

    def rename(self) -> None:
        self.path().rename(self.path())

    def remove(self) -> None:
        self.path().unlink()

    def link(self) -> None:
        self.path().symlink_to(self.path())

    def touch(self) -> None:
        self.path().touch()

    def block(self) -> None:
        self._random.choice([Path.mkdir, os.mkfifo])(self.path())  # type: ignore[operator]

    def tidy(self) -> None:
        for path in self._directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()


def open_without_waiting(path: Path) -> io.FileIO:
    """Opens a file for writing; raises OSError for a FIFO that nobody reads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    return io.FileIO(os.open(path, flags), "w")


class ServingTarget(FakeTarget):
    """Serves what it is told, as a manager does: a newer change overtakes one that is being built."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.served: dict[str, Change] = {name: Change(INT4, SetReference(None), ()) for name in names}
        self.answer = self.build

    async def build(self, call: Call) -> None:
        newest = [other for other in self.calls if other.model == call.model][-1]
        await asyncio.sleep(0.03)
        if newest is not [other for other in self.calls if other.model == call.model][-1]:
            raise FailedPreconditionError("change", "overtaken by a newer change")
        old, new = self.served[call.model], call.change
        self.served[call.model] = Change(
            new.mode or old.mode, new.parameters or old.parameters, old.layers if new.layers is None else new.layers
        )


@pytest.mark.filterwarnings("ignore:Callback with id:RuntimeWarning")  # watchdog, of folders that come and go fast
@pytest.mark.parametrize("seed", range(3))
@asynchronous
async def test_whatever_happens_the_models_end_on_what_the_files_say(watching: Watching, seed: int) -> None:
    target = watching.target = ServingTarget("a", "b", "marker")
    monkey = Monkey(watching.directory, seed)
    for _ in range(2):
        async with watching.run():
            for _ in range(3):
                await asyncio.to_thread(monkey.play, 60)
                await watching.settled()
        await asyncio.to_thread(monkey.play, 60)
    monkey.tidy()
    watching.write("1.toml", INT8_CONFIG + RULE.format(1))
    watching.write("2.toml", FP32_CONFIG + RULE.format(2))
    async with watching.run():
        await watching.settled()
        await watching.settled()
    rules = (LayerRule("layer.1", INT8), LayerRule("layer.2", INT8))
    assert target.served["a"] == Change(FP32, SetReference(None), rules)
    assert target.served["b"] == Change(INT4, SetReference(None), ())
