"""The mapped reader gives what the safetensors library wrote, and refuses every header that lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from dskquant.errors import QuantError, SourceError, StoreError
from dskquant.mapped_safetensors import MappedSafetensors

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def entry(dtype: str = "F32", shape: Any = (3, 4), begin: Any = 0, end: Any = 48) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(path: Path, header: Any, data: bytes = VALUES.tobytes()) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_it_reads_what_the_library_writes(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "f32": VALUES,
        "f16": VALUES.astype(np.float16),
        "u8": np.arange(5, dtype=np.uint8),
        "scalar": np.array(7, np.int64),
        "empty": np.empty((0, 3), np.float32),
    }
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = MappedSafetensors(tmp_path / "a.safetensors")
    assert sorted(file.names) == sorted(arrays)
    assert file.metadata == {"format": "pt"}
    assert (file.dtype("f16"), file.shape("f16")) == ("F16", (3, 4))
    for name, values in arrays.items():
        assert file.array(name).dtype == values.dtype
        assert np.array_equal(file.array(name), values)


def test_bfloat16_comes_as_bit_patterns(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)  # 1.0 and -2.0
    path = write(tmp_path / "a.safetensors", {"x": entry("BF16", (2,), 0, 4)}, bits.tobytes())
    file = MappedSafetensors(path)
    assert file.dtype("x") == "BF16"
    assert file.array("x").tolist() == [0x3F80, 0xC000]


def test_arrays_cannot_be_written_and_are_not_copies(tmp_path: Path) -> None:
    save_file({"x": VALUES}, tmp_path / "a.safetensors")
    file = MappedSafetensors(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="read-only"):
        file.array("x")[0, 0] = 1.0
    assert np.shares_memory(file.array("x"), file.array("x"))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"no json", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        ([1, 2], "not a JSON object"),
        ({"x": 5}, "tensor x: the header entry lacks"),
        ({"x": {"dtype": "F32", "shape": [3, 4]}}, "tensor x: the header entry lacks"),
        ({"x": entry("F13")}, "tensor x: unknown dtype 'F13'"),
        ({"x": entry(["F32"])}, "tensor x: unknown dtype"),
        ({"x": entry(shape=[3, 5])}, "tensor x: F32 [3, 5] takes 60 bytes, not 48"),
        ({"x": entry(shape=[-3, -4])}, "tensor x: shape"),
        ({"x": entry(shape=[3.0, 4])}, "tensor x: shape"),
        ({"x": entry(shape=[1 << 62, 1 << 62], end=1 << 124)}, "tensor x: shape"),
        ({"x": entry(begin=48, end=0)}, "tensor x: bytes 48..0"),
        ({"x": entry(begin=4, end=52)}, "tensor x: bytes 4..52 lie outside"),
        ({"x": entry(begin="0")}, "tensor x: shape"),
        ({"x": entry(), "y": entry("F32", (1,), 44, 48)}, "tensors x and y overlap"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "bad.safetensors", header)
    with pytest.raises(SourceError) as refusal:
        MappedSafetensors(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize("size", [1 << 63, 100_000_001, 5000])
def test_a_header_larger_than_the_file_is_not_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(SourceError, match=f"header size {size}"):
        MappedSafetensors(path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    """A sparse tail of any length would be read to its end otherwise; the format forbids it, as its library does."""
    path = write(tmp_path / "a.safetensors", {"x": entry()}, VALUES.tobytes() + b"..")
    with pytest.raises(SourceError, match="2 bytes follow the last tensor"):
        MappedSafetensors(path)


def test_the_caller_says_which_error_it_is(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        MappedSafetensors(tmp_path / "none.safetensors", error=StoreError)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gives_anything_but_a_refusal(tmp_path: Path, data: st.DataObject) -> None:
    """Any byte changed, any tail cut off: it opens with the same arrays in bounds, or it is refused."""
    content = bytearray(save({"x": VALUES, "y": VALUES.astype(np.float16)}))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    try:
        file = MappedSafetensors(path)
    except QuantError:
        return
    for name in file.names:
        assert file.array(name).shape == file.shape(name)
