"""A daemon that is killed while the parameter sets of its model are swapped under load, again and again.

Run as a program, it is where the daemons are forked from: it has imported all that they import, which takes longer
than to serve a tiny model.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.changed_sets import changed_set, scaled
from tests.daemon_process import SERVING, Client, DaemonProcess
from tests.golden_models import GOLDEN

from dskapi.v1 import control_pb2
from dskapi.v1.common_pb2 import (
    IN_FLIGHT_FINISH,
    IN_FLIGHT_MIGRATE,
    PRECISION_MODE_INT4,
    PRECISION_MODE_INT8,
    PrecisionMode,
)
from dskd.manager.depot import INCOMING
from dskquant.convert import ConvertOptions, convert
from dskquant.scheme import Scheme
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST, file_sha256

MODEL = "tiny"
MODES = (PRECISION_MODE_INT4, PRECISION_MODE_INT8)
SCALES = {"larger": ("layers.0", 1.5), "smaller": ("mlp", 0.6)}
STREAMS = 3
PROMPT, TOKENS = "Once upon a time", 12
CHANGES = ("apply", "switch", "rollback")
MOST_EVENTS = 6
LONGEST_S = 1.5
START_LIMIT_S = 30.0
CHANNEL = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50))


class Served(NamedTuple):
    """What decides the answer to a prompt."""

    parameter_set: str
    mode: PrecisionMode


class Outcome(NamedTuple):
    """A committed change as history has it."""

    kind: str
    generation: int
    served: Served


@dataclass(frozen=True, slots=True)
class Asked:
    """A change whose answer has not come yet."""

    kind: str
    parameter_set: str = ""  # of an apply
    mode: PrecisionMode | None = None  # unless it is a rollback

    def may_be(self, outcome: Outcome) -> bool:
        """Whether the daemon may have committed `outcome` because of it."""
        served = outcome.served
        return (
            outcome.kind == self.kind
            and self.parameter_set in ("", served.parameter_set)
            and self.mode in (None, served.mode)
        )


class ForkedDaemon(DaemonProcess):
    """A daemon whose processes are forked by `nursery`, this module run as a program."""

    def __init__(self, folder: Path, models: Mapping[str, Mapping[str, Any]], nursery: subprocess.Popen[str]) -> None:
        super().__init__(folder, models)
        self._nursery = nursery
        self._pid = 0

    def start(self, wait: bool = False) -> ForkedDaemon:
        print(self._config, self._log, file=self._nursery.stdin)
        self._pid = int(self._nursery.stdout.readline())
        return self

    def kill(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._nursery.stdout.readline()  # it is gone, and its lock on the state directory
            self._pid = 0


def tables(store: Path) -> dict[str, dict[str, Any]]:
    """The configuration of the tiny model."""
    proof = {"max_kl": 100.0, "min_agreement": 0.0, "max_worsening": 1e6}  # random weights agree on little
    return {MODEL: {"path": str(store), "kv_cache_bytes": "4MiB", "keep_generations": 3}, f"{MODEL}.proof": proof}


@contextmanager
def forked_daemon(folder: Path, store: Path) -> Iterator[ForkedDaemon]:
    """Not started yet; whatever runs at the end is killed. The path of `folder` must be short: it holds a socket."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash_swaps"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as nursery:
        daemon = ForkedDaemon(folder, tables(store), nursery)
        try:
            yield daemon
        finally:
            daemon.kill()


def make_sets(folder: Path) -> tuple[Path, list[Path]]:
    """A tiny model store, and three parameter sets for it: its own and two others."""
    store = folder / "store"
    convert(GOLDEN / "llama", store, ConvertOptions(scheme=Scheme(group_size=32)), lambda *_: None)
    default = store / DEFAULT_PARAMETER_SET
    others = [changed_set(default, folder / name, scaled(*change)) for name, change in SCALES.items()]
    return store, [default, *others]


@dataclass
class Ordeal:
    """Kills a daemon at random instants, and looks at what it comes back with."""

    daemon: ForkedDaemon
    sets: list[Path]
    chosen: random.Random
    answers: dict[Served, list[int]] = field(default_factory=dict)
    committed: list[Outcome] = field(default_factory=list)  # all there ever were, as the client knows
    kills: Counter[str] = field(default_factory=Counter)  # by what was under way
    starts_s: list[float] = field(default_factory=list)
    asked: Asked | None = None  # under way, also when the daemon was killed

    async def record(self) -> None:
        """What the model answers with each set in each mode, undisturbed."""
        self.daemon.start()
        async with self._serving() as client:
            for path in self.sets[1:] + self.sets[:1]:
                for mode in MODES:
                    await self._change(client, "apply", path, mode)
                    served = self.committed[-1].served
                    self.answers[served] = (await client.answer(PROMPT, TOKENS)).ids
        self.daemon.kill()
        assert len({tuple(ids) for ids in self.answers.values()}) == len(self.sets) * len(MODES)

    async def round(self) -> None:
        """Starts it, checks it, loads it, changes it and kills it."""
        (self._kept_sets / f"{INCOMING}torn").mkdir(parents=True, exist_ok=True)  # a rare instant leaves that
        began = time.monotonic()
        self.daemon.start()
        async with self._serving() as client:
            self.starts_s.append(time.monotonic() - began)
            await self._check(client)
            await self._change_until_killed(client)
        self.kills[self.asked.kind if self.asked else "nothing"] += 1

    async def end(self) -> None:
        """Starts it, checks it, and looks at all files after one more change."""
        self.daemon.start()
        async with self._serving() as client:
            await self._check(client)
            await self._change(client, "switch", self.sets[0], self._other_mode())
        names = {path.name for path in self.daemon.state_dir.rglob("*") if "sets" not in path.parts}
        assert names == {".lock", "history.jsonl", "models", MODEL, "state.json", "state.json.previous"}

    async def _check(self, client: Client) -> None:
        """It serves what was committed, answers as that does, and remembers every change it ever acknowledged."""
        model = await client.model()
        self._learn(await committed_history(client))
        kind, generation, served = self.committed[-1]
        now = Served(model.parameter_set, model.mode)
        assert (model.generation, now) == (generation, served), f"after {kind}"
        answer = await client.answer(PROMPT, TOKENS)
        assert answer.ids == self.answers[served]
        assert {(token.generation, token.precision) for token in answer.tokens} == {(generation, served.mode)}
        self._check_files(model)

    def _learn(self, history: list[Outcome]) -> None:
        """History is what the client knows, and at most the change that was under way when the daemon was killed."""
        known = len(self.committed)
        assert history[:known] == self.committed
        unknown = history[known:]
        assert len(unknown) <= (self.asked is not None)
        assert all(self.asked.may_be(outcome) for outcome in unknown if self.asked)
        self.kills["committed, not acknowledged"] += len(unknown)
        self.committed, self.asked = history, None

    def _check_files(self, model: control_pb2.ModelStatus) -> None:
        """The state directory holds the sets that a rollback may return to, and nothing that a crash left half-done."""
        own = file_sha256(self.sets[0] / MANIFEST)  # stays in the model store
        sets = {path.name for path in self._kept_sets.iterdir()}
        assert sets == {generation.parameter_set for generation in model.generations} - {own}

    @property
    def _kept_sets(self) -> Path:
        return self.daemon.state_dir / "models" / MODEL / "sets"

    async def _change_until_killed(self, client: Client) -> None:
        work = [asyncio.create_task(_load(client, index)) for index in range(STREAMS)]
        work.append(asyncio.create_task(self._change_for_ever(client)))
        async with client.watching() as events:
            await self._instant(events)
            broken = [task for task in work if task.done()]
            self.daemon.kill()
        assert not broken, [task.exception() for task in broken]
        for error in await asyncio.gather(*work, return_exceptions=True):
            assert isinstance(error, grpc.aio.AioRpcError), error
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error

    async def _instant(self, events: AsyncIterator[Any]) -> None:
        """Any instant, or one shortly after something happened: most of the time nothing but the build is under way."""
        count, longest_s = self.chosen.choice([(0, LONGEST_S), (self.chosen.randint(1, MOST_EVENTS), 0.02)])
        for _ in range(count):
            await anext(aiter(events))
        await asyncio.sleep(self.chosen.uniform(0, longest_s))

    async def _change_for_ever(self, client: Client) -> None:
        while True:
            kind, serving = self.chosen.choice(CHANGES), self.committed[-1].served
            others = [path for path in self.sets if file_sha256(path / MANIFEST) != serving.parameter_set]
            await self._change(client, kind, self.chosen.choice(others), self._other_mode())

    def _other_mode(self) -> PrecisionMode:
        return next(mode for mode in MODES if mode != self.committed[-1].served.mode)

    async def _change(self, client: Client, kind: str, path: Path, mode: PrecisionMode) -> None:
        """Makes a change, and keeps what the daemon acknowledges."""
        in_flight = self.chosen.choice((IN_FLIGHT_MIGRATE, IN_FLIGHT_FINISH))
        if kind == "switch":
            self.asked = Asked(kind, mode=mode)
            switched = await client.switch(mode, in_flight)
            assert switched.done
            before = self.committed[-1].served
            outcome = Outcome(kind, switched.generation, Served(before.parameter_set, switched.to_mode))
        else:
            is_apply = kind == "apply"
            self.asked = Asked(kind, file_sha256(path / MANIFEST), mode) if is_apply else Asked(kind)
            changed = await (_apply(client, path, mode) if is_apply else _roll_back(client, in_flight))
            assert changed.done
            outcome = Outcome(kind, changed.to_generation, Served(changed.parameter_set, changed.to_mode))
        self.committed.append(outcome)
        self.asked = None

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Client]:
        """A client, once the daemon serves."""
        async with grpc.aio.insecure_channel(self.daemon.target, options=CHANNEL) as channel:
            client = Client(channel)
            watch = client.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=START_LIMIT_S)
            try:
                while (await watch.read()).status != SERVING:
                    pass
            except grpc.aio.AioRpcError:
                pytest.fail(self.daemon.log_text)
            watch.cancel()
            yield client


async def committed_history(client: Client) -> list[Outcome]:
    """Oldest first."""
    request = control_pb2.GetHistoryRequest(model=MODEL, limit=10_000)
    entries = (await client.control.GetHistory(request)).entries
    assert all(entry.outcome == "committed" for entry in entries if entry.kind == "recover")
    return [
        Outcome(entry.kind, entry.generation, Served(entry.parameter_set, entry.to_mode))
        for entry in reversed(entries)
        if entry.kind in CHANGES and entry.outcome == "committed"
    ]


async def _apply(client: Client, path: Path, mode: PrecisionMode) -> control_pb2.ChangeResponse:
    precision = PrecisionMode.Name(mode).rpartition("_")[2].lower()
    config = f'model = "{MODEL}"\nprecision = "{precision}"\n[params]\nfile = "{path}"\n'
    response: control_pb2.ChangeResponse = await client.control.ApplyConfig(
        control_pb2.ApplyConfigRequest(config=config, wait=True)
    )
    return response


async def _roll_back(client: Client, in_flight: Any) -> control_pb2.ChangeResponse:
    request = control_pb2.RollbackRequest(model=MODEL, in_flight=in_flight, wait=True)
    response: control_pb2.ChangeResponse = await client.control.Rollback(request)
    return response


async def _load(client: Client, index: int) -> None:
    while True:
        await client.answer(f"{PROMPT} {index}", 60)


def _serve() -> None:
    import openvino  # noqa: F401

    import dskd.model_host
    import dskd.server  # noqa: F401
    from dskd.cli import main

    for line in sys.stdin:
        config, log = line.split()
        child = os.fork()
        if child == 0:
            _redirect(Path(log))
            sys.exit(main(["serve", "--config", config]))
        _say(child)
        os.waitpid(child, 0)
        _say("dead")


def _redirect(log: Path) -> None:
    """Standard output and error go to `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _say(word: object) -> None:
    os.write(1, f"{word}\n".encode())


if __name__ == "__main__":
    _serve()
