"""kill -9 at random instants while parameter sets are applied and rolled back under load: nothing committed is lost."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from tests.crash_swaps import Ordeal, forked_daemon, make_sets
from tests.daemon_process import asynchronous

KILLS = 50
SEED = 3


@pytest.mark.timeout(600)
@asynchronous
async def test_after_kill_9_at_any_instant_a_committed_generation_serves_with_its_whole_history() -> None:
    with tempfile.TemporaryDirectory(prefix="dskd-") as folder:
        store, sets = make_sets(Path(folder))
        with forked_daemon(Path(folder), store) as daemon:
            ordeal = Ordeal(daemon, sets, random.Random(SEED))
            await ordeal.record()
            for _ in range(KILLS):
                await ordeal.round()
            await ordeal.end()
    print(f"{dict(ordeal.kills)}, {len(ordeal.committed)} changes")
