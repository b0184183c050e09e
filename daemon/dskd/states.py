"""States of a model in the daemon. Imports nothing of the project."""

from __future__ import annotations

import enum


class ModelState(enum.Enum):
    """Where a model is in its life."""

    UNLOADED = "unloaded"  # known, not in memory
    LOADING = "loading"
    SERVING = "serving"
    UNLOADING = "unloading"
    FAILED = "failed"


LOADABLE = frozenset({ModelState.UNLOADED, ModelState.FAILED})
"""States from which a load may start."""

PASSING = frozenset({ModelState.LOADING, ModelState.UNLOADING})
"""States that end by themselves."""
