"""Plain graphs by the name of their engine, which is imported only when asked for."""

from __future__ import annotations

from pathlib import Path

from dskquant.plain.protocol import PlainGraph

PLAIN_ENGINE_NAMES = ("onnxruntime", "openvino")


def load_plain_graph(engine: str, path: Path, threads: int) -> PlainGraph:
    """The graph of an ONNX file, or for OpenVINO of an IR (`.xml`) too, computed in float32 where it is float32.

    `threads` is 0 for all cores. Raises EngineError when the engine refuses the file, ValueError for a name that is not
    in PLAIN_ENGINE_NAMES.
    """
    if engine == "onnxruntime":
        from dskquant.engines.onnxruntime.plain import OnnxRuntimePlainGraph

        return OnnxRuntimePlainGraph(path, threads)
    if engine == "openvino":
        from dskquant.engines.openvino.plain import OpenVINOPlainGraph

        return OpenVINOPlainGraph(path, threads)
    raise ValueError(f"unknown engine {engine!r}; known: {', '.join(PLAIN_ENGINE_NAMES)}")
