"""Engines by name, imported only when asked for."""

from __future__ import annotations

from dskquant.engines.protocol import Engine, SlotEngine

ENGINE_NAMES = ("openvino",)
SLOT_ENGINE_NAMES = ("onnxruntime",)


def load_engine(name: str) -> Engine:
    """The engine called `name` (one of `ENGINE_NAMES`). Raises ValueError for any other name."""
    if name == "openvino":
        from dskquant.engines.openvino import OpenVINOEngine

        return OpenVINOEngine()
    raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINE_NAMES)}")


def load_slot_engine(name: str) -> SlotEngine:
    """The engine over slots called `name` (one of `SLOT_ENGINE_NAMES`). Raises ValueError for any other name.

    Its threads will run at the priority of the calling thread.
    """
    if name == "onnxruntime":
        from dskquant.engines.onnxruntime import ONNXRuntimeEngine

        return ONNXRuntimeEngine()
    raise ValueError(f"unknown engine over slots {name!r}; known: {', '.join(SLOT_ENGINE_NAMES)}")
