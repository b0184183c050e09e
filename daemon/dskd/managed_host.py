"""What the hosts of all kinds of models leave to their manager."""

from __future__ import annotations

from typing import Generic, TypeVar

from dskd.engine.request import InFlight
from dskd.manager.model_manager import ModelManager
from dskd.manager.types import Change, ChangeReport, ManagerSnapshot, SwitchReport
from dskd.monitor.types import NoiseSnapshot
from dskquant.modes import PrecisionMode

Manager = TypeVar("Manager", bound=ModelManager)


class ManagedHost(Generic[Manager]):
    """The methods that the protocols of `dskd.host` have in common; a subclass makes the manager."""

    _manager: Manager

    async def close(self, grace_s: float) -> int:
        return await self._manager.close(grace_s)

    def snapshot(self) -> ManagerSnapshot:
        return self._manager.snapshot()

    async def switch(
        self, mode: PrecisionMode, in_flight: InFlight, actor: str, wait: bool, pin: bool = False
    ) -> SwitchReport:
        return await self._manager.switch(mode, in_flight, actor, wait, pin)

    async def apply(self, change: Change, actor: str, *, dry_run: bool, wait: bool) -> ChangeReport:
        return await self._manager.apply(change, actor, dry_run=dry_run, wait=wait)

    async def rollback(self, generation: int | None, in_flight: InFlight, actor: str, wait: bool) -> ChangeReport:
        return await self._manager.rollback(generation, in_flight, actor, wait)

    def noise(self, samples: int) -> NoiseSnapshot:
        return self._manager.noise(samples)
