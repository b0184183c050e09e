"""The depot: a set whose `keep` returned can be opened, bit by bit, whatever happens to its source or to the daemon."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crash import ROUNDS, keep_sets, killed_rounds
from golden_models import GOLDEN
from safetensors.numpy import load_file, save_file
from small_disk import disk_of, read_only
from structlog.testing import capture_logs

from dskd.errors import FailedPreconditionError, ResourceExhaustedError
from dskd.manager import depot as depot_module
from dskd.manager.depot import COMPLETED, KeepCancelledError, SetDepot
from dskquant import parameter_set
from dskquant.convert import ConvertOptions, convert
from dskquant.errors import StoreError
from dskquant.parameter_set import ParameterSet
from dskquant.scheme import Scheme
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST, file_sha256

PLANES = "planes-00001.safetensors"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("depot") / "store"
    convert(GOLDEN / "llama", store, ConvertOptions(scheme=Scheme(group_size=32)), lambda *_: None)
    return store


@pytest.fixture
def given(store: Path, tmp_path: Path) -> ParameterSet:
    """A set that was dropped somewhere."""
    return parameter_set.read(shutil.copytree(store / DEFAULT_PARAMETER_SET, tmp_path / "given"))


@pytest.fixture
def derived(given: ParameterSet, tmp_path: Path) -> ParameterSet:
    """The same without its codes: scales and zero-points alone."""
    directory = shutil.copytree(given.directory, tmp_path / "derived")
    tensors = load_file(directory / PLANES)
    save_file({name: array for name, array in tensors.items() if not name.endswith(".codes")}, directory / PLANES)
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest |= {"codes": "derived", "sha256": {PLANES: file_sha256(directory / PLANES)}}
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return parameter_set.read(directory)


@pytest.fixture
def depot(tmp_path: Path) -> SetDepot:
    return SetDepot(tmp_path / "state" / "sets")


def directory_of(tmp_path: Path) -> Path:
    return tmp_path / "state" / "sets"


def never() -> bool:
    return False


def another(parameters: ParameterSet, number: int, destination: Path) -> ParameterSet:
    """The same tensors under another hash."""
    directory = shutil.copytree(parameters.directory, destination)
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps(manifest | {"provenance": {"number": number}}))
    return parameter_set.read(directory)


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_kept_set_outlives_its_source(depot: SetDepot, given: ParameterSet, store: Path, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in given.directory.iterdir()}
    kept = depot.keep(given, store, never)
    shutil.rmtree(given.directory)
    opened = SetDepot(directory_of(tmp_path)).open(given.hash)
    assert opened == kept
    assert (opened.hash, opened.tensors) == (given.hash, given.tensors)
    assert opened.directory == directory_of(tmp_path) / given.hash
    assert {path.name: path.read_bytes() for path in opened.directory.iterdir()} == content


def test_derived_codes_are_completed_under_the_hash_of_what_was_given(
    depot: SetDepot, derived: ParameterSet, given: ParameterSet, store: Path, tmp_path: Path
) -> None:
    kept = depot.keep(derived, store, never)
    assert (kept.hash, kept.codes) == (derived.hash, parameter_set.Codes.STORED)
    assert SetDepot(directory_of(tmp_path)).open(derived.hash) == kept
    # the codes left out had been made by rounding to nearest, as derived ones are
    wanted, found = load_file(given.directory / PLANES), load_file(kept.directory / PLANES)
    assert wanted.keys() == found.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name


def test_keeping_again_copies_nothing(depot: SetDepot, given: ParameterSet, store: Path) -> None:
    kept = depot.keep(given, store, never)
    before = (kept.directory / PLANES).stat()
    shutil.rmtree(given.directory)
    assert depot.keep(given, store, never) == kept
    assert (kept.directory / PLANES).stat() == before


def test_what_the_depot_does_not_have_is_not_opened(depot: SetDepot) -> None:
    with pytest.raises(StoreError, match="missing"):
        depot.open("0" * 64)


@pytest.mark.parametrize("name", ["", "..", "../given", "0" * 63, "A" * 64])
def test_only_hashes_are_looked_up(depot: SetDepot, name: str) -> None:
    with pytest.raises(StoreError, match="is not the hash of a parameter set"):
        depot.open(name)


@pytest.mark.parametrize("name", [MANIFEST, PLANES])
@pytest.mark.parametrize("damage", [flip_last_bit, Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_damaged_kept_set_is_refused_by_name_and_replaced_when_it_is_given_again(
    depot: SetDepot, given: ParameterSet, store: Path, name: str, damage: Callable[[Path], object]
) -> None:
    damage(depot.keep(given, store, never).directory / name)
    with pytest.raises(StoreError, match=name):
        depot.open(given.hash)
    with capture_logs() as lines:
        kept = depot.keep(given, store, never)
    assert [(line["log_level"], line["hash"]) for line in lines] == [("error", given.hash)]
    assert depot.open(given.hash) == kept
    assert names_in(kept.directory.parent) == {given.hash}


@pytest.mark.parametrize("name", [MANIFEST, PLANES, COMPLETED])
def test_a_damaged_completed_set_is_refused(depot: SetDepot, derived: ParameterSet, store: Path, name: str) -> None:
    flip_last_bit(depot.keep(derived, store, never).directory / name)
    with pytest.raises(StoreError, match="damaged"):
        depot.open(derived.hash)


@pytest.mark.parametrize("name", [MANIFEST, PLANES])
@pytest.mark.parametrize("damage", [flip_last_bit, Path.unlink, lambda path: (path.unlink(), os.mkfifo(path))])
def test_a_source_that_is_not_what_its_manifest_says_is_not_kept(
    depot: SetDepot, given: ParameterSet, store: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    damage(given.directory / name)
    with pytest.raises(StoreError, match=name):
        depot.keep(given, store, never)
    assert names_in(directory_of(tmp_path)) == set()


def test_a_cancelled_keep_leaves_nothing(
    depot: SetDepot, given: ParameterSet, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depot_module, "PIECE_BYTES", 4096)
    answers = iter([False] * 5 + [True])
    with pytest.raises(KeepCancelledError):
        depot.keep(given, store, lambda: next(answers))
    assert names_in(directory_of(tmp_path)) == set()
    assert depot.keep(given, store, never).hash == given.hash


def test_deriving_codes_can_be_cancelled(depot: SetDepot, derived: ParameterSet, store: Path, tmp_path: Path) -> None:
    answers = iter([False] * 4 + [True])  # two files are copied before
    with pytest.raises(KeepCancelledError):
        depot.keep(derived, store, lambda: next(answers))
    assert names_in(directory_of(tmp_path)) == set()


def test_all_but_the_named_sets_and_what_crashes_left_are_forgotten(
    depot: SetDepot, given: ParameterSet, store: Path, tmp_path: Path
) -> None:
    sets = [depot.keep(another(given, number, tmp_path / str(number)), store, never) for number in range(3)]
    for leftover in (".incoming-1", ".outgoing-2"):
        (directory_of(tmp_path) / leftover / "given").mkdir(parents=True)
    depot.forget_all_but({sets[1].hash})
    assert names_in(directory_of(tmp_path)) == {sets[1].hash}
    with pytest.raises(StoreError, match="missing"):
        depot.open(sets[0].hash)
    assert depot.keep(parameter_set.read(tmp_path / "0"), store, never) == sets[0]


def test_forgetting_where_nothing_was_kept_is_no_error(depot: SetDepot) -> None:
    with capture_logs() as lines:
        depot.forget_all_but([])
    assert lines == []


@pytest.mark.parametrize("again", [False, True])
def test_a_set_that_is_being_kept_is_not_forgotten(
    depot: SetDepot, given: ParameterSet, store: Path, tmp_path: Path, again: bool
) -> None:
    if again:  # it is there, and must stay there until `keep` returns
        flip_last_bit(depot.keep(given, store, never).directory / PLANES)
        depot = SetDepot(directory_of(tmp_path))
    copying, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        copying.set()
        return not go_on.wait(10)

    keeper = threading.Thread(target=depot.keep, args=(given, store, wait))
    keeper.start()
    assert copying.wait(10)
    depot.forget_all_but([])
    go_on.set()
    keeper.join()
    assert depot.open(given.hash).hash == given.hash


def test_two_threads_may_keep_the_same_set(depot: SetDepot, given: ParameterSet, store: Path, tmp_path: Path) -> None:
    both_copy = threading.Barrier(2)
    installed: list[int] = []

    def keep() -> None:
        arrived = iter([True])

        def meet() -> bool:
            if next(arrived, False):
                both_copy.wait(10)
            return False

        kept = depot.keep(given, store, meet)
        installed.append((kept.directory / PLANES).stat().st_ino)

    threads = [threading.Thread(target=keep) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(installed) == 2
    assert len(set(installed)) == 1  # what one has promised is not taken away by the other
    assert names_in(directory_of(tmp_path)) == {given.hash}
    assert depot.open(given.hash).hash == given.hash


def test_a_disk_with_too_little_space_is_told_with_the_numbers_before_anything_is_copied(
    given: ParameterSet, store: Path, tmp_path: Path
) -> None:
    with disk_of("64k", tmp_path) as disk:
        with pytest.raises(ResourceExhaustedError, match=r"needs [\d.]+ KiB, free are 64\.0 KiB") as raised:
            SetDepot(disk).keep(given, store, lambda: pytest.fail("copies"))
        assert raised.value.resource == "disk"
        assert names_in(disk) == set()


@pytest.mark.parametrize("codes", ["given", "derived"])
def test_a_disk_that_fills_up_while_copying_keeps_nothing(
    request: pytest.FixtureRequest, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: str
) -> None:
    parameters: ParameterSet = request.getfixturevalue(codes)
    size = sum(path.stat().st_size for path in parameters.directory.iterdir())
    with disk_of(f"{size // 1024 + (-20 if codes == 'given' else 20)}k", tmp_path) as disk:
        monkeypatch.setattr(depot_module, "_bytes_to_keep", lambda parameters: 0)  # another one took the space since
        with pytest.raises(ResourceExhaustedError, match="no space") as raised:
            SetDepot(disk).keep(parameters, store, never)
        assert raised.value.resource == "disk"
        assert names_in(disk) == set()


def test_a_depot_that_cannot_be_written_says_so(
    depot: SetDepot, given: ParameterSet, store: Path, tmp_path: Path
) -> None:
    kept = depot.keep(another(given, 1, tmp_path / "1"), store, never)
    with read_only(directory_of(tmp_path)):
        with pytest.raises(FailedPreconditionError, match=os.strerror(errno.EROFS)):
            depot.keep(given, store, never)
        with capture_logs() as lines:
            depot.forget_all_but([])
        assert [line["log_level"] for line in lines] == ["error"]
        assert depot.open(kept.hash) == kept


def test_after_kill_9_at_any_instant_every_kept_set_opens(given: ParameterSet, tmp_path: Path) -> None:
    directory = tmp_path / "crash"
    shutil.move(given.directory, directory / "given" / "0")
    first = parameter_set.read(directory / "given" / "0")
    for number in range(1, 6):
        another(first, number, directory / "given" / str(number))
    promised: set[str] = set()
    kept_at_all = 0
    for told in killed_rounds(keep_sets, directory):
        for event, *hashes in told:
            promised = promised | set(hashes) if event == "kept" else promised & set(hashes)
            kept_at_all += event == "kept"
        depot = SetDepot(directory / "depot")
        for name in promised | {path.name for path in directory.glob("depot/[0-9a-f]*")}:
            depot.open(name)
    depot.forget_all_but(promised)
    assert names_in(directory / "depot") == promised
    assert kept_at_all > ROUNDS
