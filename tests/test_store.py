"""The manifest of a store: what nothing could work with is refused by the name of its key."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.fake_host import END, MANIFEST

from dskquant import store as store_module
from dskquant.errors import StoreError
from dskquant.store import StoreManifest


def write(store: Path, **changes: Any) -> None:
    (store / store_module.MANIFEST).write_text(json.dumps(asdict(MANIFEST) | changes))


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    assert StoreManifest.read(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("context_length", value) for value in ("x", 2**40, 0, -1, 1.5, True, None)),
        *(("parameters", value) for value in ("x", 0, 2**63)),
        *(("vocab_size", value) for value in ("a", 0)),
        *(("architecture", value) for value in ([1], None, "\ud800")),
        *(("end_token_ids", value) for value in (5, None, "5", ["a"], [-1], [10**9], [END + 1], [True])),
        *(("bos_token_id", value) for value in ("x", -1, END + 1)),
        *(("source", value) for value in ([], {"kind": 1})),
        *(("sha256", value) for value in ([], None, {"a": 1}, {"../a": "0"}, {"/a": "0"})),
    ],
)
def test_a_value_of_a_wrong_kind_or_size_is_refused(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, **{key: value})
    with pytest.raises(StoreError, match=rf"manifest\.json: {key} "):
        StoreManifest.read(tmp_path)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write(tmp_path, vocab_size=10)
    with pytest.raises(StoreError, match="end_token_ids must be a list of token ids below 10"):
        StoreManifest.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / store_module.MANIFEST).write_text(text)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        StoreManifest.read(tmp_path)
