"""How single files of the watched directory are read: nothing there makes the watcher wait, fail or write."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dskd import quant_config
from dskd.quant_config import QuantConfig
from dskd.watch.lease import is_being_written
from dskd.watch.scan import FileState, is_drop_in, read_directory, read_file, set_fingerprint
from dskd.watch.state_file import WatchState
from dskquant.modes import PrecisionMode

NOBODY = 65534


def problem_of(path: Path) -> str:
    state = read_file(path)
    assert state is not None
    assert state.text == ""
    return state.problem


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read everything: be somebody else for a moment."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def grants_leases(folder: Path) -> bool:
    path = folder / "probe"
    path.touch()
    with path.open("rb") as reader, suppress(OSError):
        fcntl.fcntl(reader.fileno(), fcntl.F_SETLEASE, fcntl.F_RDLCK)
        return True
    return False


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("a.toml", True),
        ("10-a b.toml", True),
        (".a.toml", False),
        ("#a.toml", False),
        (".#a.toml", False),
        (".a.toml.swp", False),
        ("a.toml~", False),
        ("a.toml.swp", False),
        ("a.toml.tmp", False),
        ("4913", False),
        ("..data", False),
        ("a.TOML", False),
        (".toml", False),
    ],
)
def test_only_visible_toml_files_count(name: str, counts: bool) -> None:
    assert is_drop_in(name) is counts


def test_content_is_what_identifies_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("a = 1")
    first = read_file(path)
    path.write_text("a = 2")
    os.utime(path, (0, 0))
    second = read_file(path)
    path.write_text("a = 1")
    assert first is not None
    assert second is not None
    assert first.identity != second.identity
    assert read_file(path) == first == FileState.of("a = 1")


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.toml").write_text("a = 1")
    (tmp_path / "..data").symlink_to("data")
    (tmp_path / "x.toml").symlink_to("..data/x.toml")
    assert read_directory(tmp_path) == {"x.toml": FileState.of("a = 1")}


def test_what_is_no_readable_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "dangling.toml").symlink_to("nowhere")
    (tmp_path / "memory.toml").symlink_to("/proc/self/mem")
    (tmp_path / "null.toml").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.toml"))
        assert {name: state.problem for name, state in read_directory(tmp_path).items()} == {
            "folder.toml": "cannot be read: it is a directory",
            "fifo.toml": "cannot be read: it is a FIFO",
            "loop.toml": "cannot be read: Too many levels of symbolic links",
            "dangling.toml": "is a link to nothing",
            "memory.toml": "cannot be read: Input/output error",
            "null.toml": "cannot be read: it is a device",
            "socket.toml": "cannot be read: it is a socket",
        }


def test_a_file_that_may_not_be_read_is_told() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "x.toml"
        path.write_text('model = "m"')
        path.chmod(0)
        with without_privileges():
            assert problem_of(path) == "cannot be read: Permission denied"


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b'model = "\xff"')
    assert problem_of(path) == "is not UTF-8: byte 9"


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert problem_of(path) == "has more than 512.0 KiB"
    with path.open("wb") as file:
        file.truncate(quant_config.MAX_BYTES)
    state = read_file(path)
    assert state is not None
    assert (state.problem, len(state.text)) == ("", 524_288)


def test_a_file_that_is_gone_has_no_state(tmp_path: Path) -> None:
    assert read_file(tmp_path / "x.toml") is None


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_directory(tmp_path / "none")


def test_an_open_writer_is_noticed_and_not_disturbed(tmp_path: Path) -> None:
    if not grants_leases(tmp_path):
        pytest.skip("no leases on this filesystem")
    path = tmp_path / "x.toml"
    received: list[int] = []
    before = signal.signal(signal.SIGIO, lambda number, _: received.append(number))
    try:
        with path.open("w") as writer:
            writer.write("a = 1")
            writer.flush()
            assert read_file(path) == FileState(FileState.of("a = 1").sha256, "a = 1", is_being_written=True)
            writer.write("\n")  # goes on undisturbed
        assert read_file(path) == FileState.of("a = 1\n")
        with path.open("a") as writer:  # a lease still held would block this
            writer.write("b = 2")
    finally:
        signal.signal(signal.SIGIO, before)
    assert received == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user")
def test_of_files_of_other_users_nothing_is_known() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "x.toml"
        path.write_text("a = 1")
        path.chmod(0o644)
        with path.open("a"), without_privileges():
            assert read_file(path) == FileState.of("a = 1")


def test_a_reader_is_no_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("")
    with path.open("rb") as reader, path.open("rb"):
        assert not is_being_written(reader.fileno())


def test_reading_leaves_no_descriptors_behind(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("a = 1")
    (tmp_path / "y.toml").write_bytes(b"\xff")
    (tmp_path / "z.toml").mkdir()
    (tmp_path / "memory.toml").symlink_to("/proc/self/mem")
    before = sorted(Path("/proc/self/fd").iterdir())
    for _ in range(10):
        read_directory(tmp_path)
        set_fingerprint(tmp_path)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_the_fingerprint_of_a_set_tells_each_change_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    seen = [set_fingerprint(folder)]
    folder.mkdir()
    seen.append(set_fingerprint(folder))
    manifest = folder / "manifest.json"
    for content in ("", "{}", "[]"):
        manifest.write_text(content)
        os.utime(manifest, ns=(0, len(seen)))
        seen.append(set_fingerprint(folder))
    manifest.rename(folder / "other.json")
    seen.append(set_fingerprint(folder))
    assert len(set(seen)) == len(seen)
    assert set_fingerprint(folder) == set_fingerprint(folder / "other.json") == seen[-1]


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "state" / "watch.json"
    assert WatchState.read(path) == WatchState()
    state = WatchState({"a\udcff.toml": 'model = "m"'}, {"m": QuantConfig("m", PrecisionMode.INT8)})
    state.write(path)
    assert WatchState.read(path) == state
    assert [entry.name for entry in path.parent.iterdir()] == ["watch.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format_version": 2, "texts": {}, "applied": {}}),
        json.dumps({"format_version": 1, "texts": {"x": 1}, "applied": {}}),
        json.dumps({"format_version": 1, "texts": {}, "applied": {"m": 1}}),
        json.dumps({"format_version": 1, "texts": {}, "applied": {"m": {"model": "m", "precision": "int5"}}}),
        "[" * 100_000,
    ],
)
def test_damaged_state_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "watch.json"
    path.write_text(content)
    assert WatchState.read(path) == WatchState()
