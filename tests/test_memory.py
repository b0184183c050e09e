"""Memory: the least of what the machine and the cgroups above the process leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from dskd import memory
from dskd.errors import ResourceExhaustedError

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1000 MiB available and no cgroups."""
    put(tmp_path, "proc/meminfo", f"MemTotal: {4000 * 1024} kB\nMemAvailable:   {1000 * 1024} kB\n")
    put(tmp_path, "proc/self/status", "Name:\tdskd\nVmRSS:\t    2048 kB\n")
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit_v2(root: Path, group: str, limit: str, used: int, cache: int = 0) -> None:
    folder = f"sys/fs/cgroup/{group}"
    put(root, f"{folder}/memory.max", f"{limit}\n")
    put(root, f"{folder}/memory.current", f"{used}\n")
    put(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {cache}\n")


def test_without_cgroups_the_machine_decides(root: Path) -> None:
    assert memory.available_bytes(root) == 1000 * MIB


def test_the_tightest_cgroup_on_the_way_up_decides(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/a/b\n")
    limit_v2(root, "a/b", "max", 10 * MIB)
    limit_v2(root, "a", str(500 * MIB), 200 * MIB)
    assert memory.available_bytes(root) == 300 * MIB


def test_page_cache_that_can_be_dropped_counts_as_available(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/a\n")
    limit_v2(root, "a", str(500 * MIB), 200 * MIB, cache=150 * MIB)
    assert memory.available_bytes(root) == 450 * MIB


def test_a_container_sees_its_limit_at_the_mount(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/\n")
    limit_v2(root, "", str(64 * MIB), 60 * MIB)
    assert memory.available_bytes(root) == 4 * MIB


def test_a_cgroup_over_its_limit_leaves_nothing(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/a\n")
    limit_v2(root, "a", str(10 * MIB), 12 * MIB)
    assert memory.available_bytes(root) == 0


def test_version_1_of_the_memory_controller_counts_too(root: Path) -> None:
    put(root, "proc/self/cgroup", "7:cpu,cpuacct:/x\n5:memory:/docker/abc\n")
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(100 * MIB))  # the container's own view
    put(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(70 * MIB))
    put(root, "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {20 * MIB}\n")
    assert memory.available_bytes(root) == 50 * MIB


def test_resident_memory_is_that_of_this_process(root: Path) -> None:
    assert memory.rss_bytes(root) == 2 * MIB


def test_what_fits_is_let_through(root: Path) -> None:
    memory.require(1000 * MIB, "model a", root)


def test_what_does_not_fit_is_refused_with_the_numbers(root: Path) -> None:
    with pytest.raises(ResourceExhaustedError) as caught:
        memory.require(1536 * MIB, "mode fp32 of model a", root)
    assert caught.value.resource == "memory"
    for words in ("mode fp32 of model a needs 1.5 GiB", "available are 1000.0 MiB", "536.0 MiB too little", "unload"):
        assert words in str(caught.value)


def test_the_real_machine_can_be_asked() -> None:
    total = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert 0 <= memory.available_bytes() <= total
    assert MIB < memory.rss_bytes() < total
