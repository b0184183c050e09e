"""What the watcher needs of the models."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from dskd.manager.types import Change, ChangeReport
from dskquant.modes import PrecisionMode


class Target(Protocol):
    """The models that configs are applied to. All methods belong to the asyncio thread."""

    def names(self) -> Collection[str]:
        """Of all known models, loaded or not."""
        ...

    def default_mode(self, model: str) -> PrecisionMode:
        """The mode a known model serves in when nothing else is said."""
        ...

    def is_serving(self, model: str) -> bool:
        """Whether a change of a known model can be made now."""
        ...

    async def apply(self, model: str, change: Change, actor: str) -> ChangeReport:
        """Makes `change`, records in history and events how that ended, and returns when the model serves with it.

        Overtakes a change of the same model that is still under way. Raises DskdError or QuantError when refused.
        """
        ...
