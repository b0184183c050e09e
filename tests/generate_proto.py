"""Generates the Python code of `proto/`: `python tests/generate_proto.py OUTPUT_DIRECTORY`."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).parents[1] / "proto"
SERVICE = re.compile(r"^service ", re.MULTILINE)


def generate(output: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and, where there is a service, `*_pb2_grpc.py` below `output`."""
    google_protos = files("grpc_tools").joinpath("_proto")
    include = ["protoc", f"-I{PROTO_ROOT}", f"-I{google_protos}"]
    messages = sorted(PROTO_ROOT.rglob("*.proto"))
    services = [path for path in messages if SERVICE.search(path.read_text(encoding="utf-8"))]
    for arguments in (
        [f"--python_out={output}", f"--pyi_out={output}", *map(str, messages)],
        [f"--grpc_python_out={output}", *map(str, services)],
    ):
        if protoc.main(include + arguments) != 0:
            raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
