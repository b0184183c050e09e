"""Many swaps in a row under load, in a daemon of its own, and what its process holds afterwards."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.daemon_process import Client

from dskapi.v1 import control_pb2
from dskapi.v1.inference_pb2 import GenerateRequest

PROMPT, TOKENS = "Once upon a time", 60
CONFIG = 'model = "{model}"\n[params]\nfile = "{path}"\n'


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    rss_mib: float
    threads: int
    descriptors: int
    mapped_sets: frozenset[str]  # directories whose files are mapped
    deleted: int  # mapped files that have no name any more

    @classmethod
    def by(cls, pid: int) -> Held:
        """As proc(5) tells it."""
        process = Path("/proc") / str(pid)
        status = (process / "status").read_text()
        (rss,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        maps = (process / "maps").read_text().splitlines()
        mapped = [line.split(maxsplit=5)[5] for line in maps if ".safetensors" in line]
        return cls(
            int(rss) / 1024,
            len(list((process / "task").iterdir())),
            len(list((process / "fd").iterdir())),
            frozenset(Path(path).parent.name for path in mapped if not path.endswith("(deleted)")),
            sum(path.endswith("(deleted)") for path in mapped),
        )


async def swap_under_load(client: Client, sets: Sequence[Path], swaps: int, streams: int) -> list[Held]:
    """Applies `sets` in turn while `streams` answers are open; what the daemon held after each swap.

    An answer that fails fails the soak.
    """
    load = [asyncio.create_task(_answer_for_ever(client, index)) for index in range(streams)]
    status = await client.status()
    held = []
    for path in itertools.islice(itertools.cycle(sets), swaps):
        response = await client.control.ApplyConfig(
            control_pb2.ApplyConfigRequest(config=CONFIG.format(model=status.models[0].name, path=path), wait=True)
        )
        assert response.done
        await _until_released(client, response.to_generation)
        assert not any(task.done() for task in load), [task.exception() for task in load if task.done()]
        held.append(Held.by(status.pid))
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    return held


async def answer_many(client: Client, count: int, at_once: int = 8) -> None:
    """Short answers, one after the other in each of `at_once` streams."""
    requests = iter(range(count))

    async def answer() -> None:
        for _ in requests:
            async for _ in client.inference.Generate(GenerateRequest(prompt=PROMPT, max_new_tokens=8)):
                pass

    await asyncio.gather(*(answer() for _ in range(at_once)))


async def _until_released(client: Client, generation: int) -> None:
    """Until the graphs of all generations but this one are gone."""
    async with client.watching() as events:
        while any(found.resident and found.number != generation for found in (await client.model()).generations):
            await anext(aiter(events))


async def _answer_for_ever(client: Client, index: int) -> None:
    while True:
        await client.answer(f"{PROMPT} {index}", TOKENS)
