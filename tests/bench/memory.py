"""Memory of the graphs of INT4 and INT8 together, against a plain INT8 graph; each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.bench.plain import compile_plain
from tests.bench.report import Section

from dskquant.engines import load_engine
from dskquant.engines.protocol import CompileOptions, Graph, WeightLayout
from dskquant.forward import forward
from dskquant.modes import PrecisionMode

INT4, INT8 = PrecisionMode.INT4, PrecisionMode.INT8
WHAT = {
    "shared": "INT4 + INT8, shared weights",
    "separate": "INT4 + INT8, separate weights",
    "plain": "plain INT8 graph",
}


def measure(store: Path, plain_int8: Path) -> Section:
    """Runs the three in turn."""
    figures = {what: _in_new_process(what, plain_int8 if what == "plain" else store) for what in WHAT}
    rows = []
    for what, title in WHAT.items():
        anonymous, mapped = figures[what]["RssAnon"], figures[what]["RssFile"]
        base = figures["plain"]
        rows.append(
            [
                title,
                f"{anonymous / 1024:.2f}",
                f"{mapped / 1024:.2f}",
                f"{anonymous / base['RssAnon']:.2f}x",
                f"{(anonymous + mapped) / (base['RssAnon'] + base['RssFile']):.2f}x",
            ]
        )
    return Section(
        "Memory",
        "GiB of the process after a prefill of 64 tokens and a decode step in every mode, 1.5B "
        "random Llama. Mapped pages "
        "are those of the source files, which the kernel can drop; our graphs let go of theirs once they have run.",
        ["what", "anonymous", "mapped", "anonymous / plain", "resident / plain"],
        rows,
    )


def _in_new_process(what: str, store: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.bench.memory", what, str(store)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _load(what: str, store: Path) -> list[Graph]:
    if what == "plain":
        return [compile_plain(store, INT8)]
    options = CompileOptions(weights=WeightLayout(what))
    keys = dict.fromkeys(options.graph_key(mode) for mode in (INT4, INT8))
    return [load_engine("openvino").compile(store, key, options) for key in keys]


def _exercise(graph: Graph) -> None:
    graph.bind(graph.allocate_cache(8))
    for mode in graph.modes:
        list(forward(graph, range(100, 164), mode, block_size=32))
        list(forward(graph, range(100, 102), mode, block_size=32, piece=1))
    graph.release_source()


def _main() -> None:
    graphs = _load(sys.argv[1], Path(sys.argv[2]))
    for graph in graphs:
        _exercise(graph)
    status = Path("/proc/self/status").read_text()
    fields = (line.split() for line in status.splitlines() if line.startswith("Rss"))
    print(json.dumps({name.rstrip(":"): int(kib) // 1024 for name, kib, _ in fields}))


if __name__ == "__main__":
    _main()
