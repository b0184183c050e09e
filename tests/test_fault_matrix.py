"""Damaged quant configs and parameter sets against a running daemon.

Each is refused by the name of what is wrong with it, or applied whole; until then, and after a refusal, the model
answers token by token as before.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from golden_models import GOLDEN
from test_set_validation import (
    BAD_ARRAYS,
    BAD_SETS,
    BAD_TENSORS,
    BAD_VALUES,
    DOWN,
    EMBEDDING,
    GATE,
    PLANES,
    in_arrays,
    in_manifest,
)
from tests.daemon_process import Client, asynchronous, connected
from tests.damaged_configs import BAD_CONFIGS, FOR_MODEL, MODEL, RULE
from tests.small_disk import disk_of, read_only
from tests.watched_daemon import Outcomes, Portrait, WatchedDaemon, portrait, unmoved, watched_daemon

from dskapi.v1 import control_pb2
from dskquant import validation
from dskquant.convert import ConvertOptions, convert
from dskquant.scheme import Scheme
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST, file_sha256

FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
KILOBYTE = 1024
TINY = {"kv_cache_bytes": "16MiB", "proof": {"max_kl": 1.0, "max_worsening": 1000.0}}

Damage = Callable[[Path], object]

_file_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("faults") / "store"
    options = ConvertOptions(scheme=Scheme(group_size=32, int8_plane=True))
    convert(GOLDEN / "llama", store, options, lambda *_: None)
    return store


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator[WatchedDaemon]:
    with watched_daemon(MODEL, store, TINY) as daemon:
        yield daemon


@pytest.fixture
def daemon(running: WatchedDaemon) -> Iterator[WatchedDaemon]:
    """With an empty watched directory, before and after."""
    yield running
    running.clear()


@pytest.fixture
def file() -> str:
    """A name for a config that no other test uses: what is told of another test's is not mistaken for this one's."""
    return f"{next(_file_numbers):03}.toml"


@dataclass(frozen=True)
class Visit:
    client: Client
    outcomes: Outcomes


@asynccontextmanager
async def visiting(daemon: WatchedDaemon) -> AsyncIterator[Visit]:
    async with connected(daemon.process) as client, client.watching() as events:
        yield Visit(client, Outcomes(events))


async def refusal(client: Client, text: str) -> tuple[grpc.StatusCode, dict[str, str]]:
    """The status with which the RPC refuses a config, and what its details say, by field or subject."""
    code, _, (detail,) = await client.refusal(control_pb2.ApplyConfigRequest(config=text, wait=True))
    if code is INVALID_ARGUMENT:
        return code, {violation.field: violation.description for violation in detail.field_violations}
    return code, {violation.subject: violation.description for violation in detail.violations}


@asynccontextmanager
async def applied(daemon: WatchedDaemon, visit: Visit, file: str, text: str) -> AsyncIterator[Portrait]:
    """Drops a config that is good, and takes it back in the end."""
    daemon.drop(file, text)
    generation = await visit.outcomes.generation(file)
    now = await portrait(visit.client)
    assert (now.generation, now.labels) == (generation, {generation})
    yield now
    (daemon.directory / file).unlink()
    await visit.outcomes.generation(file)


def shifted(number: int) -> Damage:
    """No damage: a set of its own, with weights that are not quite those of the default set."""

    def shift(arrays: dict[str, Any]) -> None:
        arrays[f"{EMBEDDING}.scales"] *= np.float16(1 + number / 50)

    return in_arrays(shift)


def set_hash(directory: Path) -> str:
    return file_sha256(directory / MANIFEST)


# Damaged parameter sets


@pytest.mark.parametrize(("rule", "tensor", "message", "damage"), [*BAD_VALUES, *BAD_ARRAYS, *BAD_TENSORS])
@asynchronous
async def test_a_set_with_a_damaged_tensor_changes_nothing(
    daemon: WatchedDaemon, file: str, rule: str, tensor: str, message: str, damage: Damage
) -> None:
    directory = daemon.new_set(file, damage)
    text = daemon.config_of(directory)
    async with visiting(daemon) as visit, unmoved(visit.client):
        daemon.drop(file, text)
        reason = await visit.outcomes.reason(file)
        assert re.search(message, reason)
        assert tensor in reason
        assert str(directory) in reason
        code, told = await refusal(visit.client, text)
        assert (code, list(told)) == (FAILED_PRECONDITION, [rule])
        assert re.search(message, told[rule])


def nested_manifest(directory: Path) -> None:
    (directory / MANIFEST).write_text('{"tensors": ' * 50_000 + "1" + "}" * 50_000)


def huge_manifest(directory: Path) -> None:
    os.truncate(directory / MANIFEST, 3 << 20)


def megabyte_of_a_name(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["x" * 1_000_000] = manifest["tensors"].pop(GATE)


MORE_BAD_SETS: list[tuple[str, str, Damage]] = [
    ("set-missing", "manifest.json: no parameter set is there", lambda directory: (directory / MANIFEST).unlink()),
    ("set-missing", r"planes-00001\.safetensors: missing", lambda directory: (directory / PLANES).unlink()),
    ("format-version", "format_version 3; this version reads 2",
     in_manifest(lambda manifest: manifest.update(format_version=3))),
    ("format-version", "format_version missing", in_manifest(lambda manifest: manifest.pop("format_version"))),
    ("manifest-unreadable", "RecursionError", nested_manifest),
    ("manifest-unreadable", "has more than 2097152 bytes", huge_manifest),
    ("manifest-unreadable", "not a JSON object", lambda directory: (directory / MANIFEST).write_text("[]")),
    ("manifest-unreadable", r"tensor x{60}\.\.\.: has a name of 1000000 characters", in_manifest(megabyte_of_a_name)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "message", "damage"), [*BAD_SETS, *MORE_BAD_SETS])
@asynchronous
async def test_a_damaged_set_changes_nothing(
    daemon: WatchedDaemon, file: str, rule: str, message: str, damage: Damage
) -> None:
    directory = daemon.new_set(file, damage)
    text = daemon.config_of(directory)
    async with visiting(daemon) as visit, unmoved(visit.client):
        daemon.drop(file, text)
        reason = await visit.outcomes.reason(file)
        assert re.search(message, reason)
        assert str(directory) in reason
        assert len(reason) < 5_000
        code, told = await refusal(visit.client, text)
        assert (code, list(told)) == (FAILED_PRECONDITION, [rule])


def test_every_rule_is_broken_by_a_case() -> None:
    """The table of rules in the documentation of the validation is the list to go by."""
    rows = [line.split("|")[1] for line in (validation.__doc__ or "").splitlines() if line.startswith("| ")][1:]
    documented = {rule.strip() for row in rows for rule in row.split(",")}
    assert documented == {case[0] for case in [*BAD_VALUES, *BAD_ARRAYS, *BAD_TENSORS, *BAD_SETS, *MORE_BAD_SETS]}


@pytest.mark.parametrize(("name", "rule"), [(PLANES, "file-truncated"), (MANIFEST, "manifest-unreadable")])
@asynchronous
async def test_a_set_cut_off_at_any_kilobyte_changes_nothing(
    daemon: WatchedDaemon, file: str, name: str, rule: str
) -> None:
    directory = daemon.new_set(file)
    whole = (directory / name).read_bytes()
    text = daemon.config_of(directory)
    async with connected(daemon.process) as client, unmoved(client):
        for length in range(0, len(whole), KILOBYTE):
            (directory / name).write_bytes(whole[:length])
            code, told = await refusal(client, text)
            assert (code, list(told)) == (FAILED_PRECONDITION, [rule]), length
            assert str(directory / name) in told[rule]


@asynchronous
async def test_the_set_of_another_model_changes_nothing(daemon: WatchedDaemon, file: str, tmp_path: Path) -> None:
    convert(GOLDEN / "qwen2", tmp_path / "other", ConvertOptions(scheme=Scheme(group_size=32)), lambda *_: None)
    text = daemon.config_of(tmp_path / "other" / DEFAULT_PARAMETER_SET)
    async with visiting(daemon) as visit, unmoved(visit.client):
        daemon.drop(file, text)
        assert "made for other weights than those of" in await visit.outcomes.reason(file)
        assert list((await refusal(visit.client, text))[1]) == ["wrong-weights"]


# Sets that keep every rule and are no good


def swap_layers(arrays: dict[str, Any]) -> None:
    """Every number is a possible one; two matrices of equal shape have changed places."""
    for name in [name for name in arrays if name.startswith(f"{DOWN}.")]:
        other = name.replace("layers.0", "layers.1")
        arrays[name], arrays[other] = arrays[other], arrays[name]


def largest_scales(arrays: dict[str, Any]) -> None:
    arrays[f"{GATE}.base.scales"][:] = np.finfo(np.float16).max


def lowest_zero_points(arrays: dict[str, Any]) -> None:
    for name in [name for name in arrays if name.endswith("base.zero_points")]:
        arrays[name][:] = 0


def random_codes(arrays: dict[str, Any]) -> None:
    random = np.random.default_rng(1)
    for name in [name for name in arrays if name.endswith(".codes")]:
        arrays[name] = random.integers(0, 256, arrays[name].shape, np.uint8)


@pytest.mark.parametrize("damage", [swap_layers, largest_scales, lowest_zero_points, random_codes])
@asynchronous
async def test_a_set_that_answers_the_golden_prompts_badly_changes_nothing(
    daemon: WatchedDaemon, file: str, damage: Callable[[dict[str, Any]], None]
) -> None:
    text = daemon.config_of(daemon.new_set(file, in_arrays(damage)))
    async with visiting(daemon) as visit, unmoved(visit.client):
        daemon.drop(file, text)
        assert re.search(r"int\d failed its proof", await visit.outcomes.reason(file))
        code, told = await refusal(visit.client, text)
        assert code is FAILED_PRECONDITION
        assert told.keys() <= {"int4", "int8"}


@asynchronous
async def test_a_set_with_one_other_scale_is_applied_and_named_by_every_token(daemon: WatchedDaemon, file: str) -> None:
    def damage(arrays: dict[str, Any]) -> None:
        arrays[f"{GATE}.base.scales"][0, 0] *= np.float16(1.1)

    directory = daemon.new_set(file, in_arrays(damage))
    async with visiting(daemon) as visit:
        before = await portrait(visit.client)
        async with applied(daemon, visit, file, daemon.config_of(directory)) as now:
            assert now.parameter_set == set_hash(directory)
            assert now.generation > before.generation
        assert await portrait(visit.client) == before


# Damaged configs


@pytest.mark.parametrize(("text", "message", "field"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
@asynchronous
async def test_a_damaged_config_changes_nothing(
    daemon: WatchedDaemon, file: str, text: str, message: str, field: str
) -> None:
    async with visiting(daemon) as visit, unmoved(visit.client):
        daemon.drop(file, text)
        reason = await visit.outcomes.reason(file)
        assert reason.startswith(f"{file}: ")
        assert re.search(message, reason)
        assert len(reason) < 5_000
        code, told = await refusal(visit.client, text)
        assert code is INVALID_ARGUMENT
        assert field in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'model = "\xff\xfe"\n', "is not UTF-8: byte 9"),
        (FOR_MODEL.encode("utf-16"), "is not UTF-8: byte 0"),
        (b"#" * (2 << 20), r"has more than 512\.0 KiB"),
    ],
    ids=["not UTF-8", "UTF-16", "two mebibytes"],
)
@asynchronous
async def test_a_file_that_is_no_text_changes_nothing(
    daemon: WatchedDaemon, file: str, content: bytes, message: str
) -> None:
    async with visiting(daemon) as visit, unmoved(visit.client):
        daemon.drop(file, content)
        assert re.search(f"{file}: {message}", await visit.outcomes.reason(file))


@asynchronous
async def test_a_config_for_an_unknown_model_changes_nothing(daemon: WatchedDaemon, file: str) -> None:
    text = 'model = "tinny"\nprecision = "int8"\n'
    async with visiting(daemon) as visit, unmoved(visit.client):
        daemon.drop(file, text)
        assert await visit.outcomes.reason(file) == f"{file}: no model 'tinny'; known: {MODEL}"
        code, _, (detail,) = await visit.client.refusal(control_pb2.ApplyConfigRequest(config=text))
        assert (code, detail.resource_name) == (grpc.StatusCode.NOT_FOUND, "tinny")


NO_LAYER = '[[layers]]\nmatch = "*.feed_forward.*"\nprecision = "int8"\n'
MISFITS = [
    (NO_LAYER, r"no linear layer matches '\*\.feed_forward\.\*'; there are model\.layers", "layers"),
    (RULE + NO_LAYER, r"no linear layer matches '\*\.feed_forward\.\*'", "layers"),
    ('[params]\nfile = "/nowhere/set"\n', r"/nowhere/set/manifest\.json: no parameter set is there", "set-missing"),
    ('[params]\nfile = "/etc/passwd"\n', r"/etc/passwd/manifest\.json: cannot be read", "manifest-unreadable"),
    ('[params]\nfile = "/dev/zero"\n', r"/dev/zero/manifest\.json: cannot be read", "manifest-unreadable"),
    (f'[params]\nfile = "/{"x" * 300}"\n', "File name too long", "manifest-unreadable"),
    ('[params]\nfile = "SET"\nsha256 = "' + "0" * 64 + '"\n', "not 0{64}", "params.sha256"),
]


@pytest.mark.parametrize(("tables", "message", "subject"), MISFITS)
@asynchronous
async def test_a_config_that_does_not_fit_changes_nothing(
    daemon: WatchedDaemon, file: str, tables: str, message: str, subject: str
) -> None:
    text = FOR_MODEL + tables.replace("SET", str(daemon.default_set))
    async with visiting(daemon) as visit, unmoved(visit.client):
        daemon.drop(file, text)
        assert re.search(message, await visit.outcomes.reason(file))
        code, told = await refusal(visit.client, text)
        assert (code, list(told)) == (FAILED_PRECONDITION, [subject])


# Things that are no files


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def link_to(target: str) -> Damage:
    return lambda path: path.symlink_to(target)


NO_FILES: dict[str, tuple[Damage, str]] = {
    "a FIFO": (os.mkfifo, "it is a FIFO"),
    "a directory": (Path.mkdir, "it is a directory"),
    "a socket": (socket_at, "it is a socket"),
    "a device": (link_to("/dev/zero"), "it is a device"),
    "a link to nothing": (link_to("nothing-there"), "is a link to nothing"),
    "a link to a directory": (link_to("/etc"), "it is a directory"),
    "a link to itself": (lambda path: path.symlink_to(path.name), os.strerror(errno.ELOOP)),
    "a file that cannot be read even by root": (link_to("/proc/self/mem"), os.strerror(errno.EIO)),
}


@pytest.mark.parametrize(("make", "message"), NO_FILES.values(), ids=NO_FILES)
@asynchronous
async def test_what_is_no_file_changes_nothing(daemon: WatchedDaemon, file: str, make: Damage, message: str) -> None:
    async with visiting(daemon) as visit, unmoved(visit.client):
        make(daemon.directory / file)
        assert re.search(f"^{file}: .*{message}", await visit.outcomes.reason(file))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@asynchronous
async def test_a_file_that_others_may_not_read_changes_nothing(daemon: WatchedDaemon, file: str) -> None:
    async with visiting(daemon) as visit, unmoved(visit.client):
        aside = daemon.shelf / file
        aside.write_text(FOR_MODEL)
        aside.chmod(0)
        aside.rename(daemon.directory / file)
        assert os.strerror(errno.EACCES) in await visit.outcomes.reason(file)


@asynchronous
async def test_files_that_vanish_while_they_are_looked_at_change_nothing(daemon: WatchedDaemon, file: str) -> None:
    def flicker() -> None:
        for _ in range(300):
            daemon.drop(f"gone-{file}", f'{FOR_MODEL}precision = "int8"\n')
            (daemon.directory / f"gone-{file}").unlink()

    async with visiting(daemon) as visit, unmoved(visit.client):
        await asyncio.to_thread(flicker)
        daemon.drop(file, "the last one")
        assert "Expected" in await visit.outcomes.reason(file)


# Configs that come in strange ways, and are applied whole


def all_layers_in_int8(before: Portrait) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What INT4 and INT8 answer when every layer has its residual plane in both."""
    return before.answers[1], before.answers[1]


@asynchronous
async def test_ten_thousand_lines_written_slowly_are_applied_once_and_whole(daemon: WatchedDaemon, file: str) -> None:
    """Every piece is whole TOML and ends with rules that change the answers; the file stays open for writing."""
    rule = '[[layers]]\nmatch = "*.layers.{}.*"\nprecision = "int{}"\n'
    pieces = [FOR_MODEL, *(rule.format(number % 2, 4 if number % 7 else 8) for number in range(3_332)), RULE]
    assert "".join(pieces).count("\n") >= 10_000
    async with visiting(daemon) as visit:
        before = await portrait(visit.client)
        with (daemon.directory / file).open("w") as writer:
            async with unmoved(visit.client):
                for start in range(0, len(pieces), 50):
                    writer.write("".join(pieces[start : start + 50]))
                    writer.flush()
                    await visit.client.answer(new=1)
        generation = await visit.outcomes.generation(file)
        now = await portrait(visit.client)
        assert (now.labels, now.answers) == ({generation}, all_layers_in_int8(before))
        (daemon.directory / file).unlink()
        await visit.outcomes.generation(file)  # the next one: there was none between
        assert await portrait(visit.client) == before


@asynchronous
async def test_a_storm_of_renames_ends_with_the_last_content(daemon: WatchedDaemon, file: str) -> None:
    contents = [f'{FOR_MODEL}precision = "int8"\n', "half a conf", "", FOR_MODEL + NO_LAYER]

    def storm() -> None:
        for number in range(200):
            daemon.drop(file, contents[number % len(contents)])
            (daemon.directory / file).rename(daemon.directory / f"other-{file}")
            (daemon.directory / f"other-{file}").rename(daemon.directory / file)
        daemon.drop(file, FOR_MODEL + RULE)

    async with visiting(daemon) as visit:
        before = await portrait(visit.client)
        await asyncio.to_thread(storm)
        # a slow machine may see one of the others stand still; none of them makes a generation
        await visit.outcomes.until(f"watch:{file}", lambda generation: generation != before.generation)
        assert (await portrait(visit.client)).answers == all_layers_in_int8(before)
        (daemon.directory / file).unlink()
        await visit.outcomes.generation(file)
        assert await portrait(visit.client) == before


@asynchronous
async def test_a_volume_of_kubernetes_is_followed_through_good_and_damaged_versions(
    daemon: WatchedDaemon, file: str
) -> None:
    def mount(version: str, text: str) -> None:
        """As the kubelet does: the name of the file stays the same link all along."""
        (daemon.directory / f"..{version}").mkdir()
        (daemon.directory / f"..{version}" / file).write_text(text)
        aside = daemon.directory / "..data_tmp"
        aside.symlink_to(f"..{version}")
        aside.replace(daemon.directory / "..data")

    directory = daemon.new_set(file, shifted(1))
    async with visiting(daemon) as visit:
        async with unmoved(visit.client):
            mount("1", "half a conf")
            (daemon.directory / file).symlink_to(f"..data/{file}")
            assert "Expected" in await visit.outcomes.reason(file)
        mount("2", daemon.config_of(directory))
        assert await visit.outcomes.generation(file)
        async with unmoved(visit.client) as now:
            assert now.parameter_set == set_hash(directory)
            mount("3", FOR_MODEL + NO_LAYER)
            assert "no linear layer matches" in await visit.outcomes.reason(file)
        mount("4", FOR_MODEL)
        await visit.outcomes.generation(file)


@asynchronous
async def test_a_damaged_file_keeps_what_it_said_before_in_effect_until_it_is_mended(
    daemon: WatchedDaemon, file: str
) -> None:
    text = daemon.config_of(daemon.new_set(file, shifted(2)))
    async with visiting(daemon) as visit, applied(daemon, visit, file, text):
        async with unmoved(visit.client):
            daemon.drop(file, text[:-9])
            assert "Unterminated" in await visit.outcomes.reason(file)
        async with unmoved(visit.client):
            daemon.drop(file, text)
            daemon.drop(f"later-{file}", f'{FOR_MODEL}[params]\nfile = "/nowhere"\n')
            event = await visit.outcomes.of(f"watch:{file},later-{file}")
            assert event.kind == "apply.rejected"
            (daemon.directory / f"later-{file}").unlink()


@asynchronous
async def test_of_two_files_that_contradict_each_other_the_later_name_counts(daemon: WatchedDaemon, file: str) -> None:
    one, other = (daemon.new_set(f"{number}-{file}", shifted(number)) for number in (3, 4))
    first, last = f"10-{file}", f"20-{file}"
    async with visiting(daemon) as visit:
        before = await portrait(visit.client)
        async with applied(daemon, visit, last, daemon.config_of(other)):
            daemon.drop(first, daemon.config_of(one, precision="int8"))
            event = await visit.outcomes.of(f"watch:{first},{last}")
            assert (event.kind, event.fields["to"]) == ("apply.committed", "int8")  # that key has no other file
            assert (await visit.client.model()).parameter_set == set_hash(other)
            (daemon.directory / first).unlink()
            event = await visit.outcomes.of(f"watch:{last}")
            assert (event.kind, event.fields["to"]) == ("apply.committed", "int4")
        assert await portrait(visit.client) == before


@asynchronous
async def test_a_thousand_files_are_merged_and_a_damaged_one_among_them_changes_nothing(
    daemon: WatchedDaemon, file: str
) -> None:
    names = [f"{number:03}-{file}" for number in range(1000)]
    actor = f"watch:{','.join(names[:10])} and "

    def drop_all() -> None:
        for name in names[:-1]:
            daemon.drop(name, FOR_MODEL + RULE.replace("int8", "int4"))
        daemon.drop(names[-1], FOR_MODEL + RULE)

    async with visiting(daemon) as visit:
        before = await portrait(visit.client)
        await asyncio.to_thread(drop_all)
        while (await visit.outcomes.of(f"{actor}*")).fields["actor"] != f"{actor}990 more":
            pass
        async with unmoved(visit.client) as now:
            assert now.answers == all_layers_in_int8(before)
            daemon.drop(f"zzz-{file}", FOR_MODEL + NO_LAYER)
            assert (await visit.outcomes.of(f"{actor}991 more")).kind == "apply.rejected"
            (daemon.directory / f"zzz-{file}").unlink()
        daemon.clear()
        # they may go in several waves
        await visit.outcomes.until("watch:*", lambda generation: generation == before.generation)
        assert await portrait(visit.client) == before


@pytest.mark.parametrize("where", ["outside", "home", "parent", "link", "manifest"])
@asynchronous
async def test_a_set_is_found_wherever_it_lies(daemon: WatchedDaemon, file: str, where: str) -> None:
    directory = daemon.new_set(file, shifted(5))
    (daemon.shelf / f"{file}-link").symlink_to(file)
    text = {
        "outside": str(directory),
        "home": f"~/{daemon.shelf.name}/{file}",
        "parent": f"../{daemon.shelf.name}/./{file}/",
        "link": f"../{daemon.shelf.name}/{file}-link",
        "manifest": str(directory / MANIFEST),
    }[where]
    async with visiting(daemon) as visit:
        params = {"file": text, "sha256": set_hash(directory)}
        async with applied(daemon, visit, file, daemon.config(params=params)) as now:
            assert now.parameter_set == set_hash(directory)


@asynchronous
async def test_a_set_without_codes_gets_them_and_a_damaged_one_changes_nothing(
    daemon: WatchedDaemon, file: str
) -> None:
    def without_codes(directory: Path) -> None:
        in_arrays(lambda arrays: [arrays.pop(name) for name in list(arrays) if name.endswith(".codes")])(directory)
        in_manifest(lambda manifest: manifest.update(codes="derived"))(directory)

    directory = daemon.new_set(file, without_codes)
    async with visiting(daemon) as visit:
        before = await portrait(visit.client)
        async with applied(daemon, visit, file, daemon.config_of(directory)) as now:
            assert now.answers == before.answers  # the same scales and zero-points lead to the same codes
        in_arrays(lambda arrays: arrays[f"{GATE}.base.scales"].fill(np.nan))(directory)
        async with unmoved(visit.client):
            daemon.drop(f"nan-{file}", daemon.config_of(directory))
            assert "is nan in row 0" in await visit.outcomes.reason(f"nan-{file}")


# Sets that move


@asynchronous
async def test_a_set_that_arrives_after_its_config_in_pieces_is_applied_once_and_whole(
    daemon: WatchedDaemon, file: str
) -> None:
    """Each pause is a refusal, after which the daemon waits for the set to change."""
    source, directory = daemon.new_set(f"source-{file}", shifted(6)), daemon.shelf / file
    planes = (source / PLANES).read_bytes()
    async with visiting(daemon) as visit:
        before = await portrait(visit.client)
        async with unmoved(visit.client):
            daemon.drop(file, daemon.config_of(directory))
            assert "no parameter set is there" in await visit.outcomes.reason(file)
            directory.mkdir()
            assert "no parameter set is there" in await visit.outcomes.reason(file)
            shutil.copy(source / MANIFEST, directory)
            assert f"{PLANES}: missing" in await visit.outcomes.reason(file)
            for length in (0, 10_000, 100_000):
                (directory / PLANES).write_bytes(planes[:length])
                assert "truncated" in await visit.outcomes.reason(file)
        (directory / PLANES).write_bytes(planes)
        await visit.outcomes.generation(file)
        assert (await portrait(visit.client)).parameter_set == set_hash(source)
        (daemon.directory / file).unlink()
        await visit.outcomes.generation(file)
        assert await portrait(visit.client) == before


@asynchronous
async def test_a_set_that_is_replaced_while_it_is_read_is_applied_whole_or_not_at_all(
    daemon: WatchedDaemon, file: str
) -> None:
    """Its files are overwritten in place, so that what is read is often neither the one set nor the other."""
    versions = [daemon.new_set(f"{number}-{file}", shifted(number)) for number in (7, 8)]
    directory, over = daemon.new_set(file), threading.Event()
    request = control_pb2.ApplyConfigRequest(config=daemon.config_of(directory), wait=True)

    def overwrite() -> None:
        for version in itertools.cycle(versions):
            for name in (PLANES, MANIFEST):
                (directory / name).write_bytes((version / name).read_bytes())
            if over.is_set():
                return

    async with connected(daemon.process) as client:
        before = await portrait(client)
        writing = asyncio.create_task(asyncio.to_thread(overwrite))
        seen = {before.parameter_set: before.answers}
        for _ in range(40):
            with suppress(grpc.aio.AioRpcError):
                await client.control.ApplyConfig(request)
            now = await portrait(client)
            assert now.labels == {now.generation}
            assert seen.setdefault(now.parameter_set, now.answers) == now.answers
        over.set()
        await writing
        assert seen.keys() <= {before.parameter_set, *map(set_hash, versions)}
        for version in versions:
            await client.control.ApplyConfig(
                control_pb2.ApplyConfigRequest(config=daemon.config_of(version), wait=True)
            )
            now = await portrait(client)
            assert seen.get(now.parameter_set, now.answers) == now.answers
        rollback = control_pb2.ApplyConfigRequest(config=daemon.config_of(daemon.default_set), wait=True)
        await client.control.ApplyConfig(rollback)
        assert (await portrait(client)).answers == before.answers


# Disks


@asynchronous
async def test_a_state_directory_that_cannot_be_written_changes_nothing(daemon: WatchedDaemon, file: str) -> None:
    """What cannot be made durable is not begun to be served."""
    texts = {
        "the change cannot be made durable": f'{FOR_MODEL}precision = "int8"\n',
        "the parameter set cannot be kept": daemon.config_of(daemon.new_set(file, shifted(9))),
    }
    async with visiting(daemon) as visit:
        with read_only(daemon.process.state_dir):
            async with unmoved(visit.client):
                for number, (message, text) in enumerate(texts.items()):
                    daemon.drop(f"{number}-{file}", text)
                    reason = await visit.outcomes.reason(f"{number}-{file}")
                    assert message in reason
                    assert os.strerror(errno.EROFS) in reason
                    assert list((await refusal(visit.client, text))[1]) == ["state_dir"]
                    (daemon.directory / f"{number}-{file}").unlink()
        async with applied(daemon, visit, file, text):
            pass


@asynchronous
async def test_a_full_disk_changes_nothing_and_is_tried_again_after_sighup(
    store: Path, tmp_path: Path, file: str
) -> None:
    with disk_of("2m", tmp_path) as disk, watched_daemon(MODEL, store, TINY, state_dir=str(disk / "state")) as daemon:
        directory = daemon.new_set(file, shifted(10))
        text = daemon.config_of(directory)
        async with visiting(daemon) as visit:
            filler = disk / "filler"
            async with unmoved(visit.client):
                with suppress(OSError), filler.open("wb", buffering=0) as full:
                    while full.write(b"\0" * 4096):
                        pass
                daemon.drop(file, text)
                assert re.search("free are|no space", await visit.outcomes.reason(file))
                assert (await visit.client.refusal(control_pb2.ApplyConfigRequest(config=text)))[0] is (
                    grpc.StatusCode.RESOURCE_EXHAUSTED
                )
                assert list((await refusal(visit.client, f'{FOR_MODEL}precision = "int8"\n'))[1]) == ["state_dir"]
            filler.unlink()
            daemon.process.process.send_signal(signal.SIGHUP)
            await visit.outcomes.generation(file)
            assert (await portrait(visit.client)).parameter_set == set_hash(directory)


@asynchronous
async def test_a_watched_directory_that_is_read_only_is_read(daemon: WatchedDaemon, file: str) -> None:
    """Whoever writes there does so through another mount."""
    directory = daemon.new_set(file, shifted(11))
    (daemon.shelf / f"x-{file}").write_text(daemon.config_of(directory))
    descriptor = os.open(daemon.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with read_only(daemon.directory):
            async with visiting(daemon) as visit:
                os.rename(daemon.shelf / f"x-{file}", file, dst_dir_fd=descriptor)
                await visit.outcomes.generation(file)
                os.unlink(file, dir_fd=descriptor)
                await visit.outcomes.generation(file)
    finally:
        os.close(descriptor)


@asynchronous
async def test_layers_that_were_made_exact_are_given_back(store: Path, file: str) -> None:
    """With the limits on noise that everybody has."""
    with watched_daemon(MODEL, store, {"kv_cache_bytes": "16MiB"}) as daemon:
        async with visiting(daemon) as visit, applied(daemon, visit, file, FOR_MODEL + RULE):
            pass


# Afterwards


@asynchronous
async def test_after_all_that_a_good_set_is_applied_and_a_restart_serves_it(daemon: WatchedDaemon, file: str) -> None:
    directory = daemon.new_set(file, shifted(12))
    async with visiting(daemon) as visit:
        daemon.drop(file, daemon.config_of(directory))
        await visit.outcomes.generation(file)
        before = await portrait(visit.client)
    assert before.parameter_set == set_hash(directory)
    shutil.rmtree(directory)
    assert daemon.process.stop() == 0
    daemon.process.start()
    async with connected(daemon.process) as client, unmoved(client) as now:
        assert now == before


# A model of the size of a real one


@pytest.fixture(scope="module")
def real(smollm2_store: Path) -> Iterator[WatchedDaemon]:
    with watched_daemon("smollm2", smollm2_store, {"kv_cache_bytes": "256MiB"}) as daemon:
        yield daemon


def swap_real_layers(arrays: dict[str, Any]) -> None:
    for name in [name for name in arrays if ".layers.14.mlp.down_proj." in name]:
        other = name.replace("layers.14", "layers.15")
        arrays[name], arrays[other] = arrays[other], arrays[name]


def spoil_a_scale(arrays: dict[str, Any]) -> None:
    arrays["model.layers.29.mlp.down_proj.weight.base.scales"][575, 0] = np.inf


def one_other_scale(arrays: dict[str, Any]) -> None:
    arrays["model.layers.29.mlp.down_proj.weight.base.scales"][575, 0] *= np.float16(1.25)


@asynchronous
async def test_a_real_model_refuses_what_is_damaged_and_serves_what_is_not(real: WatchedDaemon) -> None:
    damaged = {
        "scale": (spoil_a_scale, "down_proj.weight.base.scales is inf in row 575, group 0"),
        "swapped": (swap_real_layers, "failed its proof"),
    }
    async with visiting(real) as visit:
        for name, (damage, message) in damaged.items():
            directory = real.new_set(name, in_arrays(damage))
            async with unmoved(visit.client):
                real.drop(f"{name}.toml", real.config_of(directory))
                assert message in await visit.outcomes.reason(f"{name}.toml")
            (real.directory / f"{name}.toml").unlink()
            shutil.rmtree(directory)
        directory = real.new_set("good", in_arrays(one_other_scale))
        async with applied(real, visit, "good.toml", real.config_of(directory)) as now:
            assert now.parameter_set == set_hash(directory)
