"""Moves memory that is in use into huge pages: a decode step reads all weights, and looking up small pages takes time.

Engines allocate their packed weights in pages of 4 KiB, and the usual setting of the kernel ("madvise") leaves them so.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MADV_COLLAPSE = 25  # madvise(2), since Linux 6.1
HUGE = 2 << 20
SMALL = os.sysconf("SC_PAGE_SIZE")
ENTRY = np.dtype(np.uint64)
PRESENT = ENTRY.type(1 << 63)
"""In an entry of /proc/PID/pagemap, one a page (the kernel's admin-guide/mm/pagemap.rst)."""

PROCESS = Path("/proc/self")


class Range(NamedTuple):
    """Of addresses."""

    begin: int
    end: int


def collapse() -> None:
    """Puts the anonymous memory of this process into huge pages, wherever all the small ones of one are there.

    It holds as much memory afterwards. What the kernel cannot move stays where it is: all of it before Linux 6.1.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in list(_present_ranges()):
        madvise(begin, end - begin, MADV_COLLAPSE)


def _present_ranges() -> Iterator[Range]:
    """Of whole huge pages."""
    with (PROCESS / "pagemap").open("rb", buffering=0) as pagemap:
        for found in _anonymous_ranges():
            begin, end = -(-found.begin // HUGE) * HUGE, found.end // HUGE * HUGE
            if begin < end:
                pagemap.seek(begin // SMALL * ENTRY.itemsize)
                entries = np.frombuffer(pagemap.read((end - begin) // SMALL * ENTRY.itemsize), ENTRY)
                is_present = ((entries & PRESENT) != 0).reshape(-1, HUGE // SMALL).all(axis=1)
                yield from _runs(is_present, begin)


def _runs(is_present: NDArray[np.bool_], begin: int) -> Iterator[Range]:
    """Of huge pages in a row; the first of all is at `begin`."""
    edges = np.flatnonzero(np.diff(is_present, prepend=False, append=False)) * HUGE + begin
    yield from (Range(int(first), int(last)) for first, last in edges.reshape(-1, 2))


def _anonymous_ranges() -> Iterator[Range]:
    for line in (PROCESS / "maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *name = line.split()
        if inode == "0" and permissions == "rw-p" and (not name or name[0] == "[heap]"):
            first, last = (int(address, 16) for address in addresses.split("-"))
            yield Range(first, last)
