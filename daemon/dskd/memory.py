"""How much memory this process holds and may still take, as the kernel and the container's limits say.

Sources: proc(5) for /proc/meminfo and /proc/self/status; the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dskd.errors import ResourceExhaustedError
from dskd.units import format_bytes

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """File names of one version of the memory controller."""

    mount: str
    limit: str
    usage: str
    cache: str  # key of memory.stat: page cache the kernel takes back before anything fails


_V2 = _Hierarchy("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Hierarchy("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = ROOT) -> int:
    """Bytes this process may still take: what the machine has left, or less if a cgroup above it allows less."""
    return min([_kib_field(root / "proc/meminfo", "MemAvailable"), *_cgroup_headrooms(root)])


def rss_bytes(root: Path = ROOT) -> int:
    """Resident set size of this process in bytes."""
    return _kib_field(root / "proc/self/status", "VmRSS")


def require(needed: int, what: str, root: Path = ROOT) -> None:
    """Raises ResourceExhaustedError with the numbers unless `needed` bytes are available for `what`."""
    available = available_bytes(root)
    if needed > available:
        raise ResourceExhaustedError(
            "memory",
            f"{what} needs {format_bytes(needed)}, available are {format_bytes(available)}: "
            f"{format_bytes(needed - available)} too little; unload a model, keep fewer modes resident, "
            "or make kv_cache_bytes smaller",
        )


def collect_garbage() -> None:
    """Collects all garbage, and spares the collector of Python what is left, which will stay for long.

    Otherwise it looks at the whole heap again and again: no thread runs Python for 50 ms then. Whoever drops a model
    calls this too: garbage among what was spared stays until then.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Returns freed memory to the system: glibc keeps what is between blocks in use (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _kib_field(path: Path, name: str) -> int:
    """Bytes of a line like "MemAvailable:   1024 kB"."""
    for line in path.read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) << 10
    raise ValueError(f"{path} has no {name}")


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Limit minus usage of every limited cgroup from this process's own up to the root."""
    for hierarchy, group in _memberships(root):
        for folder in (group, *group.parents):
            if folder.is_relative_to(root / hierarchy.mount):
                yield from _headroom(folder, hierarchy)


def _memberships(root: Path) -> Iterator[tuple[_Hierarchy, Path]]:
    """The memory cgroups of this process; lines are "id:controllers:path", version 2 has no controllers."""
    table = root / "proc/self/cgroup"
    for line in table.read_text().splitlines() if table.exists() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield _V2, root / _V2.mount / group.lstrip("/")
        elif "memory" in controllers.split(","):
            yield _V1, root / _V1.mount / group.lstrip("/")


def _headroom(folder: Path, hierarchy: _Hierarchy) -> Iterator[int]:
    """Nothing where no limit is set; inside a container the folders above its own are not there either."""
    limit_file = folder / hierarchy.limit
    limit = limit_file.read_text().strip() if limit_file.exists() else "max"
    if limit != "max":
        used = int((folder / hierarchy.usage).read_text()) - _stat(folder / "memory.stat", hierarchy.cache)
        yield max(0, int(limit) - used)


def _stat(path: Path, key: str) -> int:
    for line in path.read_text().splitlines() if path.exists() else ():
        name, value = line.split()
        if name == key:
            return int(value)
    return 0
