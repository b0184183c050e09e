"""What the server knows of a loaded model; `dskd.model_host` and `dskd.plain.host` implement it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol, TypeGuard

from dskd.config import ModelConfig
from dskd.engine.request import GenerationRequest, InFlight, StepOutput
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.types import Change, ChangeReport, ManagerSnapshot, SwitchReport
from dskd.monitor.types import NoiseSnapshot
from dskd.plain.request import TensorAnswer, TensorRequest
from dskd.text.tokenizer import TextCodec
from dskquant.modes import PrecisionMode
from dskquant.plain.store import PlainManifest
from dskquant.store import StoreManifest


class ServedModel(Protocol):
    """One model in memory. Making a host is cheap; `load` does the work. All methods belong to the asyncio thread."""

    async def load(self) -> None:
        """Gets ready to serve without holding up the event loop.

        When it raises, or is cancelled, it has freed everything.
        """
        ...

    async def close(self, grace_s: float) -> int:
        """Refuses new requests, lets open ones finish within `grace_s` seconds, aborts the rest, frees everything.

        Returns how many were aborted (they raise UnavailableError). A call that was cancelled while it waited for
        open requests may be followed by another one.
        """
        ...

    def snapshot(self) -> ManagerSnapshot: ...

    async def switch(
        self, mode: PrecisionMode, in_flight: InFlight, actor: str, wait: bool, pin: bool = False
    ) -> SwitchReport:
        """Changes the mode of the model, and records that in history and events. Raises DskdError when it cannot.

        `pin` keeps it whatever the noise monitor says, until the next switch.
        """
        ...

    async def apply(self, change: Change, actor: str, *, dry_run: bool, wait: bool) -> ChangeReport:
        """Makes `change` and records it in history and events; `dry_run` validates it and changes nothing.

        Raises DskdError or QuantError when it is refused; what served serves on then.
        """
        ...

    async def rollback(self, generation: int | None, in_flight: InFlight, actor: str, wait: bool) -> ChangeReport:
        """Returns to a kept generation; None: the one that served before the present one.

        Raises DskdError or QuantError as `apply` does.
        """
        ...

    def noise(self, samples: int) -> NoiseSnapshot:
        """What its monitor knows, with the latest `samples` scored tokens of each mode."""
        ...


class ModelHost(ServedModel, Protocol):
    """A language model in memory."""

    @property
    def manifest(self) -> StoreManifest:
        """Valid after `load`."""
        ...

    @property
    def codec(self) -> TextCodec:
        """Valid after `load`; its methods may be called from any thread."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[StepOutput, None]:
        """The outputs of one request; the last has `finish` set. Failures are raised as DskdError, never yielded.

        Closing the generator early cancels the request and frees all it holds.
        """
        ...


class PlainHost(ServedModel, Protocol):
    """A plain graph in memory."""

    @property
    def manifest(self) -> PlainManifest:
        """Valid after `load`."""
        ...

    @property
    def config(self) -> ModelConfig:
        """That of the model, with the modes that really serve. Valid after `load`."""
        ...

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        """The answer to a request; cancelling this cancels it. Raises DskdError.

        It is InvalidArgumentError where the engine cannot compute the inputs.
        """
        ...


def is_plain(host: ServedModel) -> TypeGuard[PlainHost]:
    return isinstance(getattr(host, "manifest", None), PlainManifest)


def is_language(host: ServedModel) -> TypeGuard[ModelHost]:
    return not is_plain(host)


HostFactory = Callable[[str, ModelConfig, EventBus, History], ServedModel]
"""Makes the host of the model of that name."""
