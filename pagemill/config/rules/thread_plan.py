"""`plan_threads`: how many threads each worker of this machine computes with, and on which CPUs.

Knows the machine by its `CpuTopology` only, and binds nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.config.facts import CpuTopology
from pagemill.config.thread_lists import AUTO, parse_lists
from pagemill.errors import ConfigError
from pagemill.utils.cpu_list import format_cpu_list

ROOMY_CORES = 8
"""From so many on, a core is left to who is not a worker, and auto binds."""


@dataclass(frozen=True, slots=True)
class ThreadRequest:
    """What is asked for."""

    bind: str
    """--cpu-threads-bind: auto, nobind or lists."""
    threads: int | None
    """Per worker; None: the cores, shared out."""
    num_workers: int
    """Of all engines, on this machine."""
    front_end: bool
    """Whether other processes of ours need CPUs as well: API servers, or an engine core whose workers are apart."""
    own_process: bool = True
    """Whether workers are alone in their processes. One that is not shares it with its caller's threads."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """What each worker gets."""

    threads: int
    """At most; a worker with fewer CPUs has one thread for each."""
    cpus: tuple[tuple[int, ...], ...]
    """By worker; empty: they are not bound."""
    why: str


def plan_threads(topology: CpuTopology, request: ThreadRequest) -> ThreadPlan:
    """The plan. Raises ConfigError for CPUs that do not exist or are not allowed, for lists that are not one per
    worker, and for more threads than a list has CPUs."""
    lists = parse_lists(request.bind)
    if lists:
        _check(topology, request, lists)
        return ThreadPlan(request.threads or max(map(len, lists)), lists, "given")
    spare = request.front_end and request.threads is None and topology.num_threads >= ROOMY_CORES
    threads = request.threads or max(1, (topology.num_threads - spare) // request.num_workers)
    if request.bind != AUTO:
        return ThreadPlan(threads, (), "given")
    against = _against_binding(topology, request)
    if against is not None:
        return ThreadPlan(threads, (), against)
    shares = _share_out(topology, request, spare)
    if min(map(len, shares)) < (request.threads or 1):
        return ThreadPlan(threads, (), "there are fewer cores than threads")
    return ThreadPlan(request.threads or max(map(len, shares)), shares, "cores of their own, by NUMA node")


def _against_binding(topology: CpuTopology, request: ThreadRequest) -> str | None:
    """Why auto does not bind; None: it does."""
    if not request.own_process:
        return "the process is its caller's"
    if topology.limited:
        return f"{topology.quota:g} CPUs are allowed, and others who see the same cores would choose the same ones"
    if len(topology.cores) < ROOMY_CORES:
        return f"with fewer than {ROOMY_CORES} cores, who serves needs the workers' too"
    return None


def _share_out(topology: CpuTopology, request: ThreadRequest, spare: bool) -> tuple[tuple[int, ...], ...]:
    """CPUs of each worker, one per core: a part of a node, or whole nodes where there are more of them."""
    nodes: dict[int, list[int]] = {}
    for core in topology.cores:
        nodes.setdefault(core.node, []).append(core.cpu)
    homes = list(nodes.values())
    count = request.num_workers
    if spare and all(_even(len(home), number, len(homes), count) for number, home in enumerate(homes)):
        # Nothing is left over by itself. The first core is the one that most interrupts go to.
        max(homes, key=len).pop(0)
    if count < len(homes):
        return tuple(
            _as_few_as_hold(homes[worker * len(homes) // count : (worker + 1) * len(homes) // count], request.threads)
            for worker in range(count)
        )
    shares: list[tuple[int, ...]] = []
    for number, home in enumerate(homes):
        here = _workers_of(number, len(homes), count)
        size, rest = divmod(len(home), here)
        shares += (tuple(home[rest + i * size : rest + (i + 1) * size]) for i in range(here))
    return tuple(shares)


def _workers_of(node: int, num_nodes: int, num_workers: int) -> int:
    """How many workers a node has when there are no fewer workers than nodes."""
    return (node + 1) * num_workers // num_nodes - node * num_workers // num_nodes


def _even(num_cores: int, node: int, num_nodes: int, num_workers: int) -> bool:
    return num_workers < num_nodes or num_cores % _workers_of(node, num_nodes, num_workers) == 0


def _as_few_as_hold(homes: Sequence[Sequence[int]], threads: int | None) -> tuple[int, ...]:
    """The CPUs of these nodes, or of the first ones that are enough for the threads."""
    cpus: list[int] = []
    for home in homes:
        if threads is not None and len(cpus) >= threads:
            break
        cpus += home
    return tuple(cpus)


def _check(topology: CpuTopology, request: ThreadRequest, lists: Sequence[Sequence[int]]) -> None:
    """Raises ConfigError for lists that this machine, or the number of workers, does not fit."""
    setting = f"cpu_threads_bind={request.bind!r}"
    wanted = {cpu for cpus in lists for cpu in cpus}
    missing = wanted - topology.online
    refused = wanted - topology.nodes.keys()
    if missing:
        raise ConfigError(
            f"{setting}: CPUs {format_cpu_list(missing)} do not exist or are offline; allowed: "
            f"{format_cpu_list(topology.nodes)}"
        )
    if refused:
        raise ConfigError(
            f"{setting}: this process may not use CPUs {format_cpu_list(refused)}, by its affinity mask; allowed: "
            f"{format_cpu_list(topology.nodes)}"
        )
    if len(lists) != request.num_workers:
        raise ConfigError(
            f"{setting} has {len(lists)} lists for {request.num_workers} workers on this machine (engines x "
            "tensor_parallel_size x pipeline_parallel_size); one list per worker is needed, separated by |"
        )
    if request.threads is not None and request.threads > min(map(len, lists)):
        raise ConfigError(
            f"cpu_threads={request.threads} is more than the {min(map(len, lists))} CPUs of a list of {setting}; leave "
            "out --cpu-threads, or name more CPUs"
        )
