"""`FleetPlan`: which engines of a server run on this machine, and which of them act together: `FleetConfig`, checked.

Knows nothing about how engines are started or reached.
"""

from dataclasses import dataclass, replace

from pagemill.config.facts import DeviceFacts
from pagemill.config.fleet_config import FleetConfig
from pagemill.errors import ConfigError

MAX_PORT = 65535
FAST_BYTES_PER_S = 2e12
"""Device memory from which on a small model may write more tokens than one API server sends: an H200 (4.8e12) makes
54,000 a second with a 1B model, of which one API server sends 92% and two send all (docs/benchmarks.md)."""
CORES_PER_API_SERVER = 4
"""Cores that the machine needs for each beyond the first: it computes with one, and the engine needs others."""


@dataclass(frozen=True)
class FleetPlan:
    """The engines 0 to `size` - 1, over machines."""

    size: int
    local: range
    """Those of this machine."""
    headless: bool = False
    """Whether this machine has engines only, and the head is another one."""
    head: tuple[str, int] | None = None
    """Host and port at which nodes reach the head; None when there is one machine."""
    in_process: bool = False
    """Whether there is one engine, in the process of its caller, and no server."""
    shares_experts: bool = False
    """Whether experts are dealt out over all engines, whose workers therefore meet."""
    lockstep: bool = False
    """Whether the engines step together, in waves."""

    @property
    def remote(self) -> range:
        """Those that connect to this machine from others; none when it is not the head."""
        return range(self.local.stop if self.head is not None and not self.headless else self.size, self.size)


IN_PROCESS = FleetPlan(1, range(1), in_process=True)


def plan_fleet(fleet: FleetConfig, *, expert_parallel: bool = False) -> FleetPlan:
    """The plan that the settings ask for; `expert_parallel`: --enable-expert-parallel. Raises ConfigError that names
    those in conflict and the remedy."""
    plan = _place(fleet)
    joint = expert_parallel and plan.size > 1
    if joint:
        _check_shared_experts(fleet, plan)
    wanted = fleet.data_parallel_lockstep
    lockstep = plan.size > 1 and (joint if wanted is None else wanted)
    return replace(plan, shares_experts=joint, lockstep=lockstep)


def api_servers_for(fleet: FleetConfig, machine: DeviceFacts) -> int:
    """How many API servers "auto" means: one for each engine, and two for each where the engines' device is fast enough
    to keep more than one busy and the machine has the cores. An engine that computes on the CPU has one: the cores are
    the model's."""
    engines = fleet.data_parallel_size
    enough = machine.num_cores >= CORES_PER_API_SERVER * 2 * engines
    return 2 * engines if machine.memory_bytes_per_s >= FAST_BYTES_PER_S and enough else engines


def _place(fleet: FleetConfig) -> FleetPlan:
    """Which engines run where."""
    size = fleet.data_parallel_size
    start = fleet.data_parallel_start_rank
    address = fleet.data_parallel_address
    if fleet.data_parallel_rpc_port > MAX_PORT:
        raise ConfigError(f"data_parallel_rpc_port={fleet.data_parallel_rpc_port} is not allowed: 1 to {MAX_PORT}")
    if fleet.headless:
        _check_headless(fleet)
    elif start:
        raise ConfigError(
            f"data_parallel_start_rank={start} is for nodes, as the head has the first ranks: leave it out, or add "
            "--headless"
        )
    first = start or 0
    num_local = size - first if fleet.data_parallel_size_local is None else fleet.data_parallel_size_local
    if first + num_local > size or (fleet.headless and num_local < 1):
        raise ConfigError(
            f"data_parallel_start_rank={first} and data_parallel_size_local={num_local} are not ranks of "
            f"data_parallel_size={size}; allowed: at least one rank of 0 to {size - 1}"
        )
    local = range(first, first + num_local)
    if not fleet.headless and num_local == size:
        return FleetPlan(size, local)
    if address is None:
        raise ConfigError(
            f"data_parallel_size_local={num_local} is less than data_parallel_size={size}: --data-parallel-address (an "
            "address of this machine) and --data-parallel-rpc-port say where the machines with the others connect"
        )
    return FleetPlan(size, local, fleet.headless, (address, fleet.data_parallel_rpc_port))


def _check_shared_experts(fleet: FleetConfig, plan: FleetPlan) -> None:
    if plan.headless or plan.remote:
        raise ConfigError(
            f"enable_expert_parallel=True deals out experts over the engines of one machine, and "
            f"data_parallel_size_local={len(plan.local)} of data_parallel_size={fleet.data_parallel_size} are on this "
            "one; leave out --enable-expert-parallel, and every engine has all experts"
        )
    if fleet.data_parallel_lockstep is False:
        raise ConfigError(
            "data_parallel_lockstep=False is not allowed with enable_expert_parallel=True and several engines: they "
            "exchange tokens in every step; leave out --no-data-parallel-lockstep"
        )


def _check_headless(fleet: FleetConfig) -> None:
    needed = {
        "--data-parallel-address": fleet.data_parallel_address,
        "--data-parallel-start-rank": fleet.data_parallel_start_rank,
    }
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise ConfigError(f"headless=True needs {' and '.join(missing)}: which head, and which of its engines run here")
    if fleet.api_server_count is not None:
        raise ConfigError(
            f"api_server_count={fleet.api_server_count}: a headless node has no API servers; leave it out"
        )
