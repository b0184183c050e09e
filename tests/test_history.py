"""The history: every change that was noted is there after a restart, whatever happened to the daemon or the file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from crash import KEPT_BY_WORKER, ROUNDS, an_entry, append_entries, killed_rounds
from hypothesis import given
from hypothesis import strategies as st
from small_disk import disk_of, read_only
from structlog.testing import capture_logs

from dskd.engine.request import InFlight
from dskd.manager import history as history_module
from dskd.manager.history import History
from dskd.manager.types import HistoryEntry, ModeProof
from dskquant.modes import PrecisionMode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.jsonl"


def reasons(history: History) -> list[str]:
    """Of all entries, oldest first."""
    return [entry.reason for entry in reversed(history.newest(None, 1000))]


def written(path: Path, *texts: str) -> History:
    history = History(path)
    for text in texts:
        history.append(an_entry(text))
    return history


def test_without_a_file_the_entries_are_in_memory() -> None:
    history = History()
    assert history.append(an_entry("a")).sequence == 1
    assert history.append(an_entry("b")).sequence == 2
    assert reasons(history) == ["a", "b"]


def test_newest_comes_first_and_of_the_model_asked_for() -> None:
    history = History()
    for model, text in (("a", "1"), ("b", "2"), ("a", "3"), ("a", "4")):
        history.append(replace(an_entry(text), model=model))
    assert [entry.reason for entry in history.newest("a", 2)] == ["4", "3"]
    assert [entry.reason for entry in history.newest(None, 3)] == ["4", "3", "2"]


def test_a_restart_keeps_entries_and_goes_on_numbering(path: Path) -> None:
    before = written(path, "a", "b").newest(None, 10)
    again = History(path)
    assert again.newest(None, 10) == before
    assert again.append(an_entry("c")).sequence == 3
    assert reasons(History(path)) == ["a", "b", "c"]


def test_an_entry_is_known_by_its_id(path: Path) -> None:
    entry = written(path).append(an_entry())
    assert History(path).contains(entry.id)
    assert not History(path).contains(an_entry().id)


modes = st.none() | st.sampled_from(PrecisionMode)
numbers = st.floats(allow_nan=False)
entries = st.builds(
    HistoryEntry,
    model=st.text(),
    reason=st.text(),
    from_mode=modes,
    to_mode=modes,
    in_flight=st.none() | st.sampled_from(InFlight),
    phases_ms=st.dictionaries(st.text(), numbers),
    flip_us=numbers,
    time=numbers,
    proofs=st.lists(st.builds(ModeProof, st.sampled_from(PrecisionMode), st.none() | numbers, numbers, numbers)).map(
        tuple
    ),
)


@given(entries)
def test_any_entry_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, entry: HistoryEntry) -> None:
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    noted = History(path).append(entry)
    assert History(path).newest(None, 2) == [noted]


def test_a_proof_that_gave_no_number_is_kept(path: Path) -> None:
    proof = ModeProof(PrecisionMode.INT4, 0.5, float("nan"), 0.0)
    History(path).append(replace(an_entry(), proofs=(proof,)))
    (entry,) = History(path).newest(None, 2)
    assert str(entry.proofs[0].kl_after) == "nan"


def test_a_line_cut_anywhere_is_dropped_loudly_and_cut_off_by_the_next_append(path: Path) -> None:
    written(path, "a", "b")
    first, second = path.read_bytes().splitlines(keepends=True)
    for length in range(1, len(second), 7):
        path.write_bytes(first + second[:length])
        with capture_logs() as lines:
            history = History(path)
        assert [(line["log_level"], line["path"], line["bytes"]) for line in lines] == [("error", str(path), length)]
        assert reasons(history) == ["a"]
        assert history.append(an_entry("c")).sequence == 2
        assert reasons(History(path)) == ["a", "c"]


def test_a_file_that_is_one_torn_line_starts_anew(path: Path) -> None:
    written(path, "a")
    path.write_bytes(path.read_bytes()[:-1])
    history = History(path)
    assert reasons(history) == []
    history.append(an_entry("b"))
    with capture_logs() as lines:
        assert reasons(History(path)) == ["b"]
    assert lines == []


@pytest.mark.parametrize("damage", [b"", b"\0" * 50, b"{}", b"[]", b"\xff\xfe", b'{"model": 1}', b"[" * 100_000])
def test_damaged_lines_in_between_are_left_out_loudly(path: Path, damage: bytes) -> None:
    written(path, "a", "b", "c")
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, lines[2], b""]))
    with capture_logs() as logged:
        history = History(path)
    assert [(line["log_level"], line["path"], line["line"]) for line in logged] == [("error", str(path), 2)]
    assert reasons(history) == ["a", "c"]
    assert history.append(an_entry("d")).sequence == 4


def test_the_file_never_grows_beyond_its_limit_and_keeps_the_newest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "MOST_BYTES", 20_000)
    history, sizes = History(path), []
    for number in range(100):
        history.append(an_entry(f"{number:0500}"))
        sizes.append(path.stat().st_size)
    assert max(sizes) <= 20_000
    told = reasons(History(path))
    assert len(told) > 5
    assert told == [f"{number:0500}" for number in range(100 - len(told), 100)]
    assert reasons(history) == [f"{number:0500}" for number in range(100)]


def test_a_file_that_is_too_large_is_shortened_at_a_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(path, *"abcdef")
    line = len(path.read_bytes()) // 6
    monkeypatch.setattr(history_module, "MOST_BYTES", 5 * line)
    assert reasons(History(path)) == list("abcdef")
    assert reasons(History(path)) == ["e", "f"]


def test_half_a_surrogate_pair_in_a_reason_is_spelled_out(path: Path) -> None:
    assert written(path).append(an_entry("x\ud800y")).reason == "x\\ud800y"
    assert reasons(History(path)) == ["x\\ud800y"]


def test_the_file_is_shortened_at_a_start_once_it_is_twice_as_long_as_what_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "KEPT_ENTRIES", 3)
    history = written(path, *"abcdef")
    assert reasons(history) == ["d", "e", "f"]
    History(path)
    assert len(path.read_bytes().splitlines()) == 6
    history.append(an_entry("g"))
    assert reasons(History(path)) == ["e", "f", "g"]
    assert len(path.read_bytes().splitlines()) == 3
    assert History(path).append(an_entry("h")).sequence == 8


def test_an_append_is_on_disk_when_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, synced = written(path, "a"), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes().count(b"\n")))
    history.append(an_entry("b"))
    assert synced == [2]


def test_a_reason_that_quotes_a_megabyte_is_cut(path: Path) -> None:
    kept = History(path).append(an_entry("b" * 1_000_000))
    assert kept.reason == "b" * 4000 + "..."
    assert reasons(History(path)) == [kept.reason]


def test_on_a_full_disk_the_entry_stays_in_memory_and_no_half_of_it_on_disk(tmp_path: Path) -> None:
    with disk_of("64k", tmp_path) as disk:
        history = written(disk / "history.jsonl", "a")
        before = (disk / "history.jsonl").read_bytes()
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(1 << 17))
        with capture_logs() as lines:
            lost = history.append(an_entry("b" * 4000))  # longer than what is left of the file's last page
        assert [(line["log_level"], line["id"]) for line in lines] == [("error", lost.id)]
        assert "No space left" in lines[0]["reason"]
        assert (disk / "history.jsonl").read_bytes() == before
        assert reasons(history) == ["a", "b" * 4000]
        (disk / "filler").unlink()
        history.append(an_entry("c"))
        with capture_logs() as lines:
            assert reasons(History(disk / "history.jsonl")) == ["a", "c"]
        assert lines == []


def test_where_nothing_can_be_written_the_history_goes_on_in_memory(path: Path) -> None:
    written(path, "a")
    with read_only(path.parent):
        history = History(path)
        with capture_logs() as lines:
            history.append(an_entry("b"))
        assert [line["log_level"] for line in lines] == ["error"]
        assert reasons(history) == ["a", "b"]


def test_a_file_that_cannot_be_read_is_told_and_left_alone(path: Path) -> None:
    path.mkdir(parents=True)
    with capture_logs() as lines:
        history = written(path, "a")
    assert [line["event"] for line in lines] == ["history cannot be read", "history entry is kept in memory alone"]
    assert reasons(history) == ["a"]
    assert path.is_dir()


def test_after_kill_9_at_any_instant_every_entry_that_was_appended_is_there(tmp_path: Path) -> None:
    promised: list[list[str]] = []
    for told in killed_rounds(append_entries, tmp_path):
        promised += told
        entries = History(tmp_path / "history.jsonl").newest(None, 1000)
        found = [[str(entry.sequence), entry.id] for entry in reversed(entries)]
        promised += [entry for entry in found[-1:] if entry not in promised[-1:]]  # on disk, but killed before it told
        assert found == promised[-len(found) :]
        assert len(found) >= min(len(promised), KEPT_BY_WORKER)
    assert [number for number, _ in promised] == [str(number) for number in range(1, len(promised) + 1)]
    assert len(promised) > ROUNDS
