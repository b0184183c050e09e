"""Memory that is used moves into huge pages; memory that is not used stays untouched."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dskd import huge_pages
from dskd.huge_pages import HUGE, SMALL

KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])
needs_collapse = pytest.mark.skipif(KERNEL < (6, 1), reason="MADV_COLLAPSE came with Linux 6.1")
SIZE = 16 * HUGE


def kept(array: NDArray[np.uint8], field: str) -> int:
    """Bytes of a field of /proc/self/smaps of the mapping that `array` lies in."""
    address, is_inside = array.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == f"{field}:":
            return int(rest[0]) << 10
    raise ValueError(f"no {field} at {address:x}")


def mapping(advice: int = mmap.MADV_NORMAL) -> NDArray[np.uint8]:
    memory = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    return np.frombuffer(memory, np.uint8)


@needs_collapse
def test_memory_that_is_whole_moves_and_keeps_its_values() -> None:
    array = mapping()
    array[:] = np.arange(SIZE, dtype=np.uint32) % 251
    huge_pages.collapse()
    assert kept(array, "AnonHugePages") >= SIZE - 2 * HUGE
    assert (array == np.arange(SIZE, dtype=np.uint32) % 251).all()


def test_memory_that_nobody_has_touched_takes_no_more() -> None:
    """As most of a KV cache."""
    array = mapping()
    array[:: 4 * SMALL] = 1
    before = kept(array, "Rss")
    huge_pages.collapse()
    assert kept(array, "Rss") == before


def test_a_kernel_that_refuses_is_no_error() -> None:
    array = mapping(mmap.MADV_NOHUGEPAGE)
    array[:] = 7
    huge_pages.collapse()
    assert kept(array, "AnonHugePages") == 0
    assert (array == 7).all()
