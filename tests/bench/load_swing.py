"""Load that swings between 1 and 16 streams, with switches and a swap inside, beside daemons of one engine each."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.report import Section
from tests.bench.served import NAME, Round, Served, serving
from tests.changed_sets import changed_set, scaled

from dskapi.v1 import control_pb2
from dskd.config import EngineUse
from dskd.rpc.convert import MODES
from dskquant.modes import PrecisionMode
from dskquant.store import DEFAULT_PARAMETER_SET

INT4, INT8 = PrecisionMode.INT4, PrecisionMode.INT8
AUTO, *ALONE = (EngineUse.AUTO.value, EngineUse.OPENVINO.value, EngineUse.ONNXRUNTIME.value)
LEVELS = (1, 16, 2, 8, 4, 16, 1, 4, 8, 2)
"""Streams, one round after the other, over and over."""

PROMPT, NEW = 32, 96
SWINGING_S = 180.0
"""Of the daemon that chooses; the others get as many rounds, in turn with its own."""

CHANGES_AT = {0.25: INT8, 0.45: INT4, 0.6: None, 0.85: INT8, 0.95: INT4}
"""When the mode is switched, in shares of that time; None: another parameter set."""


@dataclass
class Tally:
    """What rounds of one daemon, level and mode have made."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Swing:
    """The rounds so far."""

    daemons: dict[str, Served]
    other_set: Path
    tallies: defaultdict[tuple[str, PrecisionMode, int], Tally] = field(default_factory=lambda: defaultdict(Tally))
    answers: int = 0
    seconds: float = 0.0  # of the rounds of the daemon that chooses
    mode: PrecisionMode = INT4
    due: dict[float, PrecisionMode | None] = field(default_factory=CHANGES_AT.copy)

    async def run(self) -> None:
        """Any failure of any answer ends it."""
        levels = itertools.cycle(LEVELS)
        for streams in levels:
            if self.seconds >= SWINGING_S:
                return
            change = self._due_change()
            if change:
                await self._rounds_during(change, levels)
                continue
            for engine, served in self.daemons.items():
                made = await self._round(served, streams, None if engine == AUTO else self.mode)
                tally = self.tallies[engine, self.mode, streams]
                tally.tokens += streams * NEW
                tally.seconds += made.seconds
                self.seconds += made.seconds if engine == AUTO else 0.0

    async def _rounds_during(self, change: Coroutine[Any, Any, object], levels: Iterator[int]) -> None:
        changing = asyncio.create_task(change)
        while not changing.done():
            self.seconds += (await self._round(self.daemons[AUTO], next(levels), None)).seconds
        await changing

    async def _round(self, served: Served, streams: int, mode: PrecisionMode | None) -> Round:
        self.answers += streams
        return await served.round(streams, PROMPT, NEW, mode)

    def _due_change(self) -> Coroutine[Any, Any, object] | None:
        at = next((at for at in self.due if at * SWINGING_S <= self.seconds), None)
        if at is None:
            return None
        mode, auto = self.due.pop(at), self.daemons[AUTO]
        if mode is None:
            return self._swap(auto)
        self.mode = mode
        return auto.client.switch(MODES[mode])

    async def _swap(self, auto: Served) -> None:
        config = f'model = "{NAME}"\n[params]\nfile = "{self.other_set}"\n'
        report = await auto.client.control.ApplyConfig(control_pb2.ApplyConfigRequest(config=config, wait=True))
        if not report.done:
            raise RuntimeError(f"the swap was not made: {report}")


def measure(store: Path) -> Section:
    """Three minutes of a swinging load."""
    return asyncio.run(_measure(store))


async def _measure(store: Path) -> Section:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        other = changed_set(store / DEFAULT_PARAMETER_SET, folder / "other", scaled("layers.0.", 1.01))
        daemons = {use: await stack.enter_async_context(serving(store, use)) for use in (AUTO, *ALONE)}
        for served in daemons.values():
            for mode in (INT4, INT8):
                await served.round(1, PROMPT, 4, mode)  # packs weights
        swing, before = Swing(daemons, other), await _moves(daemons[AUTO])
        await swing.run()
        moves = await _moves(daemons[AUTO]) - before
    print(swing.tallies, file=sys.stderr)
    return _section(swing, moves)


async def _moves(served: Served) -> int:
    return int((await served.client.model()).second_engine.moves)


def _section(swing: Swing, moves: int) -> Section:
    minutes = swing.seconds / 60
    return Section(
        "Load that swings",
        f'SmolLM2-135M, `engine = "auto"`: rounds of 1 to 16 streams (prompts of {PROMPT} tokens, {NEW} new ones) for '
        f"{swing.seconds:.0f} s, with {len(CHANGES_AT) - 1} switches between INT4 and INT8 and a swap of the parameter "
        f"set inside. Of {swing.answers} answers none failed. {moves} moves: {moves / minutes:.1f} a minute. Beside "
        "it, in turn, the same rounds by daemons of one engine (`onnxruntime`: with OpenVINO for prompts and beyond 8 "
        "streams). Tokens a second with everything, prompts included, but for rounds during a change.",
        ["mode", "streams", AUTO, *ALONE, "auto / the better one"],
        [
            _row(swing, mode, streams)
            for mode in (INT4, INT8)
            for streams in sorted(set(LEVELS))
            if (AUTO, mode, streams) in swing.tallies  # INT8 serves too shortly to see every level in a slow run
        ],
    )


def _row(swing: Swing, mode: PrecisionMode, streams: int) -> list[str]:
    rates = [swing.tallies[engine, mode, streams].rate for engine in (AUTO, *ALONE)]
    return [mode.value, str(streams), *(f"{rate:.0f}" for rate in rates), f"{rates[0] / max(rates[1:]):.2f}x"]
