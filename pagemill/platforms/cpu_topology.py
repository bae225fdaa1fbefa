"""`read_topology`: which CPUs this process may use, and which cores and NUMA nodes they belong to, from /sys and /proc.

Does not know who will compute on them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from pagemill.config.facts import Core, CpuTopology
from pagemill.utils.cpu_list import parse_cpu_list

_CGROUP = "sys/fs/cgroup"


def read_topology(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> CpuTopology:
    """The machine's, as this process may use it. `root` holds sys/ and proc/; `allowed`: the affinity mask, by default
    that of this process. What a file does not say is taken as one core per CPU, one node."""
    cpu_folder = root / "sys/devices/system/cpu"
    mask = set(_affinity() if allowed is None else allowed)
    online = set(_cpus_in(cpu_folder / "online") or mask)
    usable = sorted(mask & online) or sorted(mask)
    homes = _nodes(root)
    nodes = {cpu: homes.get(cpu, 0) for cpu in usable}
    first_of: dict[tuple[int, ...], int] = {}
    for cpu in usable:
        siblings = _cpus_in(cpu_folder / f"cpu{cpu}/topology/thread_siblings_list")
        first_of.setdefault(tuple(siblings) if cpu in siblings else (cpu,), cpu)
    cores = sorted((Core(cpu, nodes[cpu]) for cpu in first_of.values()), key=lambda core: (core.node, core.cpu))
    return CpuTopology(nodes, tuple(cores), frozenset(online), _quota(root))


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _nodes(root: Path) -> dict[int, int]:
    """CPU -> node. Nodes without CPUs, which have memory only, do not occur."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {cpu: int(folder.name[4:]) for folder in folders for cpu in _cpus_in(folder / "cpulist")}


def _quota(root: Path) -> float | None:
    """The least of this process's control group and those above it, which version 1 and 2 of control groups write
    differently."""
    least: float | None = None
    for folder in _group_folders(root):
        unified = _text(folder / "cpu.max").split()
        period_us = _text(folder / "cpu.cfs_period_us")
        if len(unified) != 2:
            unified = [_text(folder / "cpu.cfs_quota_us"), period_us]
        if all(part.isdigit() and int(part) > 0 for part in unified):  # max, and -1, are no limit
            share = int(unified[0]) / int(unified[1])
            least = share if least is None else min(least, share)
    return least


def _group_folders(root: Path) -> Iterable[Path]:
    """Of every group that this process is in, down from the top. In a container the path may be that of the host, and
    then only the top is there."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / _CGROUP / controllers if controllers else root / _CGROUP
        inner = Path(path.lstrip("/"))
        yield from (top / part for part in (*reversed(inner.parents), inner))


def _cpus_in(path: Path) -> list[int]:
    """Empty for a file that is not there, or not a list."""
    try:
        return parse_cpu_list(_text(path))
    except ValueError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
