"""Makes sessions of ONNX Runtime for graphs whose constants lie beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import _pybind_state as core

from dskquant.engines.onnxruntime.graph_writer import GraphWriter
from dskquant.errors import EngineError

PROVIDER = "CPUExecutionProvider"
ERRORS_ONLY = 3
SETTINGS = {
    "session.intra_op.allow_spinning": "1",
    "session.force_spinning_stop": "1",
    "session.inter_op.allow_spinning": "0",
}
"""The threads of a run meet hundreds of times, and waking one takes long. Those that spin between runs would take the
cores from the other engine."""


class SessionMaker:
    """Makes sessions whose threads run at the priority of whoever made the maker, however low that of the caller is.

    On Linux a thread inherits the niceness of the one that starts it, and may not lower it again: were a session made
    as a whole by a background thread, its threads would serve at background priority for ever. So a thread of the
    maker's own constructs the session, which starts its threads; reading and packing the weights, which takes seconds,
    is left to the caller. The Python class does both at once, hence the steps below it (onnxruntime 1.32).
    """

    def __init__(self) -> None:
        self._starter = ThreadPoolExecutor(1, "onnxruntime-session")
        self._starter.submit(lambda: None).result()  # the thread is started with the first task: now

    def make(self, writer: GraphWriter, threads: int) -> ort.InferenceSession:
        """A session with the constants of `writer` copied or packed: they are not needed afterwards.

        Raises EngineError when the library refuses the graph.
        """
        options = session_options(threads)
        constants = [shared(values) for values in writer.beside.values()]
        options.add_external_initializers(list(writer.beside), constants)
        try:
            session = self._starter.submit(core.InferenceSession, options, writer.serialized(), False, False).result()
            session.initialize_session([PROVIDER], [{}], set())
        except Exception as error:  # the library has a dozen unrelated types for it
            raise EngineError(f"ONNX Runtime cannot load the model: {error}") from error
        return ort.InferenceSession._from_initialized_c_session(session)


def session_options(threads: int) -> ort.SessionOptions:
    """What all sessions have in common; `threads` is 0 for all cores."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = ERRORS_ONLY
    for key, value in SETTINGS.items():
        options.add_session_config_entry(key, value)
    return options


def shared(array: NDArray[Any]) -> ort.OrtValue:
    """An OrtValue over the memory of `array`, which must be contiguous."""
    return ort.OrtValue.ortvalue_from_numpy(array)
