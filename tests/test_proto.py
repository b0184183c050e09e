"""The Python code of the protocols."""

from __future__ import annotations

from pathlib import Path

from tests.generate_proto import PROTO_ROOT, generate


def test_the_committed_code_is_what_the_protocols_say(tmp_path: Path) -> None:
    generate(tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*_pb2*.py*")}
    kept = {path.relative_to(PROTO_ROOT): path.read_bytes() for path in PROTO_ROOT.rglob("*_pb2*.py*")}
    kept = {path: content for path, content in kept.items() if path.suffix != ".pyc"}
    assert sorted(kept) == sorted(made)
    assert [path for path in kept if kept[path] != made[path]] == []
