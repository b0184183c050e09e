"""A model host that plays a script, and a daemon around it; for the tests of the server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from tests.daemon_process import Client
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dskd.address import Address
from dskd.config import Config, ModelConfig, ServerConfig, WatchConfig
from dskd.engine.request import (
    FinishReason,
    GenerationRequest,
    InFlight,
    LoopSnapshot,
    MadeToken,
    RequestStats,
    StepOutput,
)
from dskd.errors import UnavailableError
from dskd.manager.types import (
    Change,
    ChangeReport,
    GenerationState,
    ManagerSnapshot,
    ModeState,
    SecondEngineState,
    SwitchReport,
)
from dskd.monitor.config import MonitorConfig
from dskd.monitor.types import NoiseSnapshot
from dskd.server import Daemon
from dskd.text.tokenizer import TextCodec
from dskquant.modes import LADDER, PrecisionMode
from dskquant.store import CHAT_TEMPLATE, TOKENIZER, StoreManifest

END = 256
"""The end-of-text token; the tokens below it are the bytes of UTF-8 text."""

MANIFEST = StoreManifest(
    model_id="tiny",
    architecture="llama",
    dtype="f16",
    num_layers=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=257,
    context_length=1000,
    parameters=12_345,
    bos_token_id=None,
    end_token_ids=(END,),
)
GENERATIONS = (
    GenerationState(5, "abc", "set5", 1_700_000_000.5, True, True, {PrecisionMode.INT4: 0.25, PrecisionMode.INT8: 0.5}),
    GenerationState(3, "def", "set3", 1_600_000_000.0, False, False, {}),
)
STATS = RequestStats(queue_s=0.25, first_token_s=0.5, total_s=1.0, preemptions=3)

Script = Sequence[StepOutput | Exception | asyncio.Event]


def output(*ids: int, mode: PrecisionMode = PrecisionMode.INT4, finish: FinishReason | None = None) -> StepOutput:
    """One step's tokens, all made by `mode`."""
    tokens = tuple(MadeToken(id_, mode, 1, "fake") for id_ in ids)
    return StepOutput("", tokens, finish, STATS if finish else None)


def outputs(text: str, finish: FinishReason = FinishReason.LENGTH) -> list[StepOutput]:
    """One step for each byte of `text`; the last one finishes."""
    steps = [output(byte) for byte in text.encode()]
    return [*steps[:-1], replace(steps[-1], finish=finish, stats=STATS)]


class FakeHost:
    """Plays `script` to every request (an event in it is waited for) and records what it was asked."""

    manifest = MANIFEST

    def __init__(self, codec: TextCodec, script: Script = ()) -> None:
        self.codec = codec
        self.script = script
        self.load_result: Exception | asyncio.Event | None = None
        self.switch_result: SwitchReport | Exception | None = None
        self.requests: list[GenerationRequest] = []
        self.switches: list[tuple[PrecisionMode, InFlight, str, bool, bool]] = []  # mode, in_flight, actor, wait, pin
        self.noise_result: NoiseSnapshot | None = None
        self.noise_samples: list[int] = []
        self.change_result: ChangeReport | Exception | None = None
        self.changes: list[tuple[Change, str, bool, bool]] = []  # change, actor, dry_run, wait
        self.rollbacks: list[tuple[int | None, InFlight, str, bool]] = []
        self.freed: asyncio.Queue[str] = asyncio.Queue()
        self.graces: list[float] = []
        self.second: SecondEngineState | None = None
        self._closing = self._aborted = False
        self._open = 0
        self._idle = asyncio.Event()

    @property
    def load_waits(self) -> bool:
        return isinstance(self.load_result, asyncio.Event)

    async def load(self) -> None:
        if isinstance(self.load_result, Exception):
            raise self.load_result
        if self.load_result:
            await self.load_result.wait()

    async def close(self, grace_s: float) -> int:
        self.graces.append(grace_s)
        self._closing = True
        aborted = 0
        if self._open:
            try:
                await asyncio.wait_for(self._idle.wait(), grace_s)
            except asyncio.TimeoutError:
                aborted = self._abort()
        return aborted

    def _abort(self) -> int:
        self._aborted = True
        for item in self.script:
            if isinstance(item, asyncio.Event):
                item.set()
        return self._open

    def snapshot(self) -> ManagerSnapshot:
        modes = tuple(ModeState(mode, mode is PrecisionMode.INT4, 100, 7, 1) for mode in LADDER)
        tokens = {"fake": 3, "other": 4}
        loop = LoopSnapshot(
            running=self._open,
            waiting=2,
            blocks_total=10,
            blocks_free=4,
            tokens_by_engine=tokens,
            slots_used=1,
            moves=2,
        )
        return ManagerSnapshot(
            "fake", PrecisionMode.INT4, 5, "abc", "set5", GENERATIONS, modes, loop, 640, "", self.second
        )

    async def switch(
        self, mode: PrecisionMode, in_flight: InFlight, actor: str, wait: bool, pin: bool = False
    ) -> SwitchReport:
        self.switches.append((mode, in_flight, actor, wait, pin))
        if isinstance(self.switch_result, SwitchReport):
            return self.switch_result
        raise self.switch_result or AssertionError("no switch was scripted")

    async def apply(self, change: Change, actor: str, *, dry_run: bool, wait: bool) -> ChangeReport:
        self.changes.append((change, actor, dry_run, wait))
        return self._changed()

    async def rollback(self, generation: int | None, in_flight: InFlight, actor: str, wait: bool) -> ChangeReport:
        self.rollbacks.append((generation, in_flight, actor, wait))
        return self._changed()

    def _changed(self) -> ChangeReport:
        if isinstance(self.change_result, ChangeReport):
            return self.change_result
        raise self.change_result or AssertionError("no change was scripted")

    def noise(self, samples: int) -> NoiseSnapshot:
        self.noise_samples.append(samples)
        if self.noise_result is None:
            raise AssertionError("no noise was scripted")
        return self.noise_result

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StepOutput, None]:
        if self._closing:
            raise UnavailableError("the model is being unloaded")
        self.requests.append(request)
        self._open += 1
        self._idle.clear()
        try:
            for item in self.script:
                if isinstance(item, StepOutput):
                    yield replace(item, request_id=request.request_id)
                elif isinstance(item, Exception):
                    raise item
                else:
                    await item.wait()
                    if self._aborted:
                        raise UnavailableError("the model was unloaded before the answer was complete")
        finally:
            self._open -= 1
            self._idle.set()
            self.freed.put_nowait(request.request_id)


@dataclass
class Service(Client):
    """A running daemon and a client of it."""

    daemon: Daemon
    ending: asyncio.Task[int] | None = None

    def end(self) -> asyncio.Task[int]:
        """Begins an orderly shutdown; the result of the task is the exit code."""
        self.daemon.stop()
        self.ending = self.ending or asyncio.create_task(self.daemon.shutdown())
        return self.ending


@asynccontextmanager
async def serving(
    folder: Path,
    hosts: dict[str, FakeHost],
    watch: WatchConfig | None = None,
    monitor: MonitorConfig | None = None,
    **server: Any,
) -> AsyncIterator[Service]:
    """A daemon on a unix socket in `folder` with these hosts, loaded; `server` replaces defaults of its section."""
    socket = folder / "dskd.sock"
    config = Config(
        server=ServerConfig(**{"listen": (Address(path=socket),), "grace_s": 5.0, **server}),
        models={name: ModelConfig(path=folder / name, monitor=monitor) for name in hosts},
        watch=watch or WatchConfig(),
    )
    daemon = Daemon(config, lambda name, *_: hosts[name])
    await daemon.startup()
    loads = [daemon.registry.get(name).loading for name, host in hosts.items() if not host.load_waits]
    await asyncio.gather(*(load for load in loads if load), return_exceptions=True)
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        service = Service(channel, daemon)
        try:
            yield service
        finally:
            service.daemon.stop()
            service.daemon.stop()
            await service.end()


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine function in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


def tiny_codec(folder: Path) -> TextCodec:
    """The codec of a store in `folder` whose tokens are the bytes of UTF-8 text, and the end of text."""
    MANIFEST.write(folder)
    alphabet = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<end>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / TOKENIZER))
    template = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    (folder / CHAT_TEMPLATE).write_text(template)
    return TextCodec.load(folder)


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte in byte-level BPE (GPT-2's bytes_to_unicode)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + index) for index, byte in enumerate(hidden)}}
