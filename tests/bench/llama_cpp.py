"""llama.cpp as its users run it: its own benchmarks, and llama-server over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

START_LIMIT_S = 120.0
CONTEXT = 4096
DATA = b"data: "


class LlamaCpp:
    """The programs of one build in `folder`, with `threads` threads each."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._threads = str(threads)

    def prefill_rate(self, model: Path, tokens: int) -> float:
        """Prompt tokens a second, by llama-bench."""
        return self._llama_bench(model, "-p", str(tokens), "-n", "0")

    def decode_rate(self, model: Path, streams: int, prompt: int, new: int) -> float:
        """New tokens a second of all streams: by llama-bench for one, by llama-batched-bench for more."""
        if streams == 1:
            return self._llama_bench(model, "-p", "0", "-n", str(new), "-d", str(prompt))
        sizes = ["-c", str(CONTEXT), "-npp", str(prompt), "-ntg", str(new), "-npl", str(streams)]
        (line,) = self._lines("llama-batched-bench", model, *sizes, "--output-format", "jsonl")
        return float(line["speed_tg"])

    def quantize(self, source: Path, kind: str, destination: Path) -> None:
        """Writes `source`, a GGUF file of whatever type, in `kind`."""
        self._run("llama-quantize", "--allow-requantize", str(source), str(destination), kind, self._threads)

    @contextmanager
    def server(self, model: Path) -> Iterator[LlamaServer]:
        """llama-server with one slot, once it is ready."""
        port = _free_port()
        command = [self._folder / "llama-server", "-m", model, "-t", self._threads, "-c", str(CONTEXT), "-np", "1"]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
            try:
                yield LlamaServer(port)
            finally:
                process.kill()
                process.wait()

    def _llama_bench(self, model: Path, *sizes: str) -> float:
        (line,) = self._lines("llama-bench", model, *sizes, "-r", "1", "-o", "jsonl")
        return float(line["avg_ts"])

    def _lines(self, program: str, model: Path, *arguments: str) -> list[dict[str, Any]]:
        output = self._run(program, "-m", str(model), "-t", self._threads, *arguments)
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def _run(self, program: str, *arguments: str) -> str:
        command = [self._folder / program, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


class LlamaServer:
    """A running llama-server."""

    def __init__(self, port: int) -> None:
        self._port = port
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise TimeoutError("llama-server does not start")
            time.sleep(0.1)

    def answer(self, prompt: Sequence[int], new: int) -> float:
        """Seconds from the request to the last of its `new` tokens, which are streamed."""
        request = {"prompt": list(prompt), "n_predict": new, "ignore_eos": True, "cache_prompt": False, "stream": True}
        began = time.perf_counter()
        with closing(HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
            lines = connection.getresponse()
            *_, last = (json.loads(line[len(DATA) :]) for line in lines if line.startswith(DATA))
        taken = time.perf_counter() - began
        if last["tokens_predicted"] != new or last["tokens_evaluated"] != len(prompt):
            raise RuntimeError(f"llama-server did not make {new} tokens of {len(prompt)}: {last}")
        return taken

    def _is_ready(self) -> bool:
        with closing(HTTPConnection("127.0.0.1", self._port)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == HTTPStatus.OK
            except OSError:
                return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def threads() -> int:
    """As many as the daemon uses by default."""
    return len(os.sched_getaffinity(0))
