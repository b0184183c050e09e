"""Engines by name, imported only when asked for."""

from __future__ import annotations

from dskquant.engines.protocol import Engine

ENGINE_NAMES = ("openvino",)


def load_engine(name: str) -> Engine:
    """The engine called `name` (one of `ENGINE_NAMES`). Raises ValueError for any other name."""
    if name == "openvino":
        from dskquant.engines.openvino import OpenVINOEngine

        return OpenVINOEngine()
    raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINE_NAMES)}")
