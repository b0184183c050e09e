"""Processes that are killed while they write: run as a program, this does the writing, one forked process a round.

A worker tells what has been promised to be on disk, a word a line; the test kills it and looks at the files.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, NoReturn

from dskd.engine.request import InFlight
from dskd.manager import history as history_module
from dskd.manager.depot import SetDepot
from dskd.manager.history import History
from dskd.manager.state_file import Committed, KeptGeneration, read_committed
from dskd.manager.types import HistoryEntry, ModeProof
from dskquant import parameter_set
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule

ROUNDS = 60
MOST_STEPS = 4  # before it is killed
KEPT_BY_WORKER = 3
DEAD = "dead"

Tell = Callable[..., None]


def an_entry(reason: str = "") -> HistoryEntry:
    return HistoryEntry(
        "m",
        "apply",
        "somebody",
        "committed",
        reason,
        PrecisionMode.INT4,
        PrecisionMode.INT8,
        generation=2,
        hash="ab",
        in_flight=InFlight.FINISH,
        phases_ms={"build": 12.5},
        proofs=(ModeProof(PrecisionMode.INT4, None, 0.25, 0.75),),
    )


def a_state(number: int) -> Committed:
    """A state whose parts all tell its number; thousands of bytes, so that half of it could be on disk."""
    rules = (LayerRule("*.mlp.*", PrecisionMode.INT8),) * 50
    kept = KeptGeneration(number, f"hash {number}", f"set {number}", rules, 1.5, {PrecisionMode.INT4: 0.25})
    return Committed(PrecisionMode.INT8, PrecisionMode.INT4, number, number, (kept,), an_entry(str(number)))


def write_states(directory: Path, tell: Tell) -> NoReturn:
    path = directory / "m.json"
    newest = read_committed(path)
    for number in count(newest[0].generation + 1 if newest else 1):
        a_state(number).write(path)
        tell(number)
    raise AssertionError


def append_entries(directory: Path, tell: Tell) -> NoReturn:
    """With a history that keeps few entries, so that the file is rewritten at most starts."""
    history_module.KEPT_ENTRIES = KEPT_BY_WORKER
    while True:
        history = History(directory / "history.jsonl")
        for _ in range(5):
            entry = history.append(an_entry("é" * 500))
            tell(entry.sequence, entry.id)


def keep_sets(directory: Path, tell: Tell) -> NoReturn:
    depot = SetDepot(directory / "depot")
    sets = [parameter_set.read(path) for path in sorted((directory / "given").iterdir())]
    while True:
        random.shuffle(sets)
        for parameters in sets:
            tell("kept", depot.keep(parameters, directory, lambda: False).hash)
        wanted = {parameters.hash for parameters in sets[:2]}
        tell("keeping-only", *wanted)
        depot.forget_all_but(wanted)


def killed_rounds(worker: Callable[[Path, Tell], NoReturn], directory: Path) -> Iterator[list[list[str]]]:
    """Starts the worker, kills it at a random instant, yields the lines it told; and so on."""
    step_s = 0.01
    command = [sys.executable, __file__, worker.__name__, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as parent:
        for _ in range(ROUNDS):
            print(file=parent.stdin)
            worker_id, began = int(parent.stdout.readline()), time.monotonic()
            told = [parent.stdout.readline().split() for _ in range(random.randint(0, MOST_STEPS))]
            step_s = (time.monotonic() - began) / len(told) if told else step_s
            time.sleep(random.uniform(0, 2 * step_s))  # somewhere in the next steps
            os.kill(worker_id, signal.SIGKILL)
            yield told + list(_told(parent.stdout))


def _told(lines: IO[str]) -> Iterator[list[str]]:
    for line in lines:
        if line == f"{DEAD}\n":
            return
        yield line.split()
    raise AssertionError("the worker failed before it was killed")


def _serve(worker: Callable[[Path, Tell], NoReturn], directory: Path) -> None:
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            random.seed()
            _say(os.getpid())
            worker(directory, _say)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit("the worker failed")
        _say(DEAD)


def _say(*words: object) -> None:
    """One write a line: lines of two processes do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    _serve({item.__name__: item for item in (write_states, append_entries, keep_sets)}[sys.argv[1]], Path(sys.argv[2]))
