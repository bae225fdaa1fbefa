"""Machines as /sys and /proc show them, written to a folder."""

from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from pagemill.config.facts import CpuTopology
from pagemill.platforms.cpu_topology import read_topology


@dataclass
class Machine:
    """`nodes[n]`: the cores of NUMA node n, each with its CPUs."""

    root: Path
    nodes: list[list[list[int]]]
    offline: set[int] = field(default_factory=set)

    def write(self) -> "Machine":
        cpus = sorted(cpu for node in self.nodes for core in node for cpu in core)
        online = [cpu for cpu in cpus if cpu not in self.offline]
        self.file("sys/devices/system/cpu/online", ",".join(map(str, online)))
        for number, node in enumerate(self.nodes):
            here = [cpu for core in node for cpu in core if cpu not in self.offline]
            self.file(f"sys/devices/system/node/node{number}/cpulist", ",".join(map(str, sorted(here))))
            for core in node:
                siblings = ",".join(map(str, sorted(set(core) - self.offline)))
                for cpu in set(core) - self.offline:
                    self.file(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        return self

    def file(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text + "\n")

    def topology(self, allowed: list[int] | range | None = None) -> CpuTopology:
        every = [cpu for node in self.nodes for core in node for cpu in core]
        return read_topology(self.root, every if allowed is None else allowed)


def machine(
    root: Path, num_nodes: int, cores_per_node: int, *, smt: bool = True, offline: Set[int] = frozenset()
) -> Machine:
    """CPUs as Linux numbers them: first one of every core, over all nodes, then the siblings in the same order."""
    total = num_nodes * cores_per_node
    nodes = [
        [[cpu, cpu + total] if smt else [cpu] for cpu in range(node * cores_per_node, (node + 1) * cores_per_node)]
        for node in range(num_nodes)
    ]
    return Machine(root, nodes, set(offline)).write()
