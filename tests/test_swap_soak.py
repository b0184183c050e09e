"""Many swaps in a row under load: nothing is left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.crash_swaps import make_sets, tables
from tests.daemon_process import asynchronous, connected, daemon_process
from tests.swap_soak import swap_under_load

SWAPS = 30
"""`python -m tests.bench soak` makes more."""
WARM_UP = 10
SETS_MAPPED = 3
"""Directories with mapped files at most: the store (golden answers), the set that serves, the one on its way out."""


@asynchronous
async def test_many_swaps_leave_neither_memory_nor_threads_nor_descriptors_behind() -> None:
    with tempfile.TemporaryDirectory(prefix="dskd-") as folder:
        store, sets = make_sets(Path(folder))
        with daemon_process(tables(store)) as daemon:
            async with connected(daemon.start()) as client:
                held = await swap_under_load(client, sets[1:] + sets[:1], SWAPS, streams=2)
    before, after = held[:WARM_UP], held[WARM_UP:]
    assert after[-1].rss_mib < 1.1 * before[-1].rss_mib
    assert max(found.threads for found in after) <= max(found.threads for found in before)
    # the smallest of the last: a file may be open for the instant of a look, but what is leaked stays
    assert min(found.descriptors for found in held[-WARM_UP:]) <= max(found.descriptors for found in before)
    assert all(len(found.mapped_sets) <= SETS_MAPPED and not found.deleted for found in held)
