"""The committed state: what is on disk was written whole, and what is damaged is left out loudly."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crash import ROUNDS, a_state, killed_rounds, write_states
from small_disk import disk_of, read_only
from structlog.testing import capture_logs

from dskd import durable
from dskd.manager.state_file import committed_mode, previous_of, read_committed
from dskquant.modes import PrecisionMode

FIRST, SECOND, THIRD = a_state(1), a_state(2), a_state(3)
SHORT = replace(THIRD, kept=(replace(THIRD.kept[0], layers=THIRD.kept[0].layers[:1]),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "m.json"


def names_in(directory: Path) -> set[str]:
    return {item.name for item in directory.iterdir()}


def test_without_a_file_nothing_is_committed_and_nothing_is_wrong(path: Path) -> None:
    with capture_logs() as lines:
        assert read_committed(path) == []
    assert lines == []


def test_the_two_newest_states_are_read_back_newest_first(path: Path) -> None:
    FIRST.write(path)
    assert read_committed(path) == [FIRST]
    SECOND.write(path)
    assert read_committed(path) == [SECOND, FIRST]
    THIRD.write(path)
    assert read_committed(path) == [THIRD, SECOND]
    assert names_in(path.parent) == {"m.json", "m.json.previous"}


def test_modes_are_spelled_in_the_file_as_everywhere(path: Path) -> None:
    FIRST.write(path)
    written = json.loads(path.read_text())
    assert written["format_version"] == 1
    assert (written["mode"], written["default_mode"], written["kept"][0]["kl"]) == ("int8", "int4", {"int4": 0.25})


def test_the_committed_mode_counts_until_the_configuration_has_another_default() -> None:
    assert committed_mode(FIRST, PrecisionMode.INT4) is PrecisionMode.INT8
    assert committed_mode(FIRST, PrecisionMode.FP16) is PrecisionMode.FP16


def test_a_state_whose_active_generation_is_not_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="active generation 7 is not among the kept"):
        replace(FIRST, generation=7)


def test_a_file_cut_anywhere_gives_the_state_before_it(path: Path) -> None:
    FIRST.write(path)
    SHORT.write(path)
    for length in reversed(range(path.stat().st_size - 1)):  # the last byte is a newline
        os.truncate(path, length)
        with capture_logs() as lines:
            assert read_committed(path) == [FIRST], length
        assert [(line["log_level"], line["path"]) for line in lines] == [("error", str(path))]


def wrong_values(value: Any, may_be_null: bool) -> list[Any]:
    """Values of every JSON type that `value` is not of."""
    others: list[Any] = ["", 0.5, True, [], {}, -1] + [None] * (not may_be_null)
    allowed = (type(value), int) if type(value) is float else (type(value),)
    return [other for other in others if type(other) not in allowed]


def each_place(value: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [where] * bool(where) + [place for key in keys for place in each_place(value[key], (*where, key))]


def at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def test_a_value_of_another_type_is_refused_wherever_it_stands(path: Path) -> None:
    SHORT.write(path)
    good = json.loads(path.read_text())
    nullable = {("change",), *(("change", key) for key in ("from_mode", "to_mode", "in_flight"))}
    for place in each_place(good):
        if at(good, place) is None or place == ("format_version",):
            continue
        for wrong in wrong_values(at(good, place), may_be_null=place in nullable):
            bad = copy.deepcopy(good)
            at(bad, place[:-1])[place[-1]] = wrong
            path.write_text(json.dumps(bad))
            with capture_logs() as lines:
                assert read_committed(path) == [], (place, wrong)
            assert lines[0]["path"] == str(path)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda state: state.pop("mode"), "missing keys: mode"),
        (lambda state: state["kept"][0].pop("hash"), r"missing keys: kept[0].hash"),
        (lambda state: state.update(colour="red"), "unknown keys: colour"),
        (lambda state: state.update(mode="int3"), "mode: must be one of int4, int8, fp16, fp32, not 'int3'"),
        (lambda state: state.update(default_mode="INT4"), "default_mode: must be one of"),
        (lambda state: state.update(format_version=2), "format_version 2; this version reads 1"),
        (lambda state: state.pop("format_version"), "format_version None; this version reads 1"),
        (lambda state: state.update(generation=2), "active generation 2 is not among the kept [1]"),
        (lambda state: state.update(kept=[]), "active generation 1 is not among the kept []"),
        (lambda state: state.update(last_number=0), "up to last_number 0"),
        (lambda state: state["kept"].append(state["kept"][0]), "must be different"),
        (lambda state: state["kept"][0].update(kl={"int2": 0.5}), "kept[0].kl: must be one of"),
        (lambda state: state["kept"][0].update(kl={"int4": float("nan")}), "must be finite"),
        (lambda state: state["kept"][0].update(parameter_set=""), "has no hash"),
        (lambda state: state["kept"][0]["layers"][0].update(precision="fp16"), "precision fp16; allowed: int4, int8"),
        (lambda state: state["change"].update(in_flight="later"), "change.in_flight: must be one of migrate, finish"),
        (lambda state: state["change"].update(time=10**400), "change.time: must be of type float"),
    ],
)
def test_a_state_that_cannot_be_is_left_out_with_its_reason(
    path: Path, edit: Callable[[dict[str, Any]], object], reason: str
) -> None:
    FIRST.write(path)
    state = json.loads(path.read_text())
    edit(state)
    path.write_text(json.dumps(state))
    with capture_logs() as lines:
        assert read_committed(path) == []
    assert (lines[0]["log_level"], lines[0]["path"]) == ("error", str(path))
    assert reason in lines[0]["reason"]


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_state_at_all_is_left_out(path: Path, content: bytes) -> None:
    FIRST.write(path)
    SECOND.write(path)
    path.write_bytes(content)
    assert read_committed(path) == [FIRST]


def test_a_directory_in_place_of_the_file_is_left_out(path: Path) -> None:
    path.mkdir(parents=True)
    with capture_logs() as lines:
        assert read_committed(path) == []
    assert "Is a directory" in lines[0]["reason"]


def test_a_damaged_file_does_not_push_out_the_good_one_before_it(path: Path) -> None:
    FIRST.write(path)
    SECOND.write(path)
    path.write_text("{")
    THIRD.write(path)
    assert read_committed(path) == [THIRD, FIRST]


def test_a_crash_between_keeping_the_old_and_placing_the_new_leaves_nothing_behind(path: Path) -> None:
    FIRST.write(path)
    previous_of(path).hardlink_to(path)  # as far as the crashed one came
    path.with_name(".m.json.new").write_text('{"half')
    path.with_name(".m.json.previous.new").hardlink_to(path)
    assert read_committed(path) == [FIRST, FIRST]
    SECOND.write(path)
    assert read_committed(path) == [SECOND, FIRST]
    assert names_in(path.parent) == {"m.json", "m.json.previous"}


def test_the_content_is_on_disk_before_it_gets_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FIRST.write(path)
    steps: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        real_sync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        steps.append(f"{self.name} -> {target.name}")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    SECOND.write(path)
    assert steps == [
        "sync .m.json.new",
        ".m.json.previous.new -> m.json.previous",
        ".m.json.new -> m.json",
        "sync state",
    ]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_disk_that_fails_to_sync_leaves_an_old_or_a_new_state(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    FIRST.write(path)
    calls = iter(range(1, 3))

    def sync(descriptor: int) -> None:
        if next(calls) == failing:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        with pytest.raises(OSError, match="Input/output"):
            SECOND.write(path)
    assert read_committed(path)[0] == (FIRST if failing == 1 else SECOND)
    assert ".m.json.new" not in names_in(path.parent)


def test_a_full_disk_leaves_the_old_state(tmp_path: Path) -> None:
    with disk_of("64k", tmp_path) as disk:
        path = disk / "m.json"
        FIRST.write(path)
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(1 << 17))
        with pytest.raises(OSError, match="No space left"):
            SECOND.write(path)
        assert read_committed(path) == [FIRST]
        assert names_in(disk) == {"m.json", "filler"}


def test_a_directory_that_cannot_be_written_leaves_the_old_state(path: Path) -> None:
    FIRST.write(path)
    with read_only(path.parent):
        with pytest.raises(OSError, match="Read-only"):
            SECOND.write(path)
        assert read_committed(path) == [FIRST]


def test_after_kill_9_at_any_instant_the_newest_state_that_was_written_is_there(tmp_path: Path) -> None:
    newest = 0
    for told in killed_rounds(write_states, tmp_path):
        last = max([newest, *(int(number) for (number,) in told)])
        with capture_logs() as lines:
            states = read_committed(tmp_path / "m.json")
        assert lines == []
        assert states == [a_state_like(state) for state in states]
        assert [state.generation for state in states] in possible(last)
        newest = states[0].generation if states else 0
    assert newest > ROUNDS


def possible(last: int) -> list[list[int]]:
    """The newest state is the last whose write returned, or the one after it."""
    pairs = [[last, last - 1], [last + 1, last], [last, last]]
    return [[number for number in pair if number > 0] for pair in pairs]


def a_state_like(state: Any) -> Any:
    """What was written under the number of `state`, whose times and ids alone are of the process that wrote it."""
    made = a_state(state.generation)
    return replace(made, change=replace(made.change, id=state.change.id, time=state.change.time))


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    durable.replace_file(tmp_path / "a" / "b" / "c", b"x")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"x"
