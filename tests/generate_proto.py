"""Generates the Python code of `proto/`: `python tests/generate_proto.py OUTPUT_DIRECTORY`."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).parents[1] / "proto"
SERVICES = ("inference", "control")


def generate(output: Path) -> None:
    """Writes `dskapi/v1/*_pb2.py`, `*_pb2.pyi` and, where there is a service, `*_pb2_grpc.py` below `output`."""
    package = PROTO_ROOT / "dskapi" / "v1"
    google_protos = files("grpc_tools").joinpath("_proto")
    include = ["protoc", f"-I{PROTO_ROOT}", f"-I{google_protos}"]
    messages = sorted(str(path) for path in package.glob("*.proto"))
    services = [str(package / f"{name}.proto") for name in SERVICES]
    for arguments in (
        [f"--python_out={output}", f"--pyi_out={output}", *messages],
        [f"--grpc_python_out={output}", *services],
    ):
        if protoc.main(include + arguments) != 0:
            raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
