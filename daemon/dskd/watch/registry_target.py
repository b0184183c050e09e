"""The models of the daemon as the watcher needs them."""

from __future__ import annotations

from collections.abc import Collection

from dskd.manager.types import Change, ChangeReport
from dskd.registry import ModelRegistry
from dskd.states import ModelState
from dskquant.modes import PrecisionMode


class RegistryTarget:
    """Implements `dskd.watch.target.Target`."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def names(self) -> Collection[str]:
        return [entry.name for entry in self._registry.entries()]

    def default_mode(self, model: str) -> PrecisionMode:
        return self._registry.get(model).default_mode

    def is_serving(self, model: str) -> bool:
        return self._registry.get(model).state is ModelState.SERVING

    async def apply(self, model: str, change: Change, actor: str) -> ChangeReport:
        return await self._registry.get(model).serving_host.apply(change, actor, dry_run=False, wait=True)
