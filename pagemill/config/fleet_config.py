"""The processes of a server: `FleetConfig`. No engine is told of it, so `EngineSettings` does not list it."""

from dataclasses import dataclass

from pagemill.config.fields import setting

BALANCERS = ("prefix", "queue", "round_robin")


@dataclass(frozen=True)
class FleetConfig:
    """The processes of a server: how many, and what is done when one shows no sign of life."""

    data_parallel_size: int = setting(1, "engines that each hold the whole model", low=1, short="-dp")
    data_parallel_balancer: str = setting(
        "prefix",
        "which engine gets a request: the one that has its prefix unless it is busy, the one with the shortest queue, "
        "or the next",
        choices=BALANCERS,
    )
    data_parallel_lockstep: bool | None = setting(
        None, "engines step together, in waves (default: where experts are dealt out over them)"
    )
    data_parallel_size_local: int | None = setting(
        None,
        "how many of the data_parallel_size engines run on this machine (default: all; headless: those from "
        "the start rank on)",
        low=0,
        short="-dpl",
    )
    data_parallel_start_rank: int | None = setting(
        None, "rank of the first engine of this machine; the head has those from 0 on", low=0, short="-dpr"
    )
    data_parallel_address: str | None = setting(
        None, "address of the head, where the machines with the other engines connect", short="-dpa"
    )
    data_parallel_rpc_port: int = setting(
        29550, "port on the head where the machines with the other engines connect", low=1, short="-dpp"
    )
    data_parallel_node_timeout: float = setting(
        10.0,
        "seconds without a message after which the head of a server and a machine with other engines take "
        "each other for gone",
        low=1,
    )
    headless: bool = setting(False, "run engines only, for the API servers of a head on another machine")
    api_server_count: int | str | None = setting(
        None,
        "processes that take HTTP requests (default: as many as engines); auto: by the cores and the speed of the "
        "engine's device",
        low=1,
        short="-asc",
        words=("auto",),
    )
    engine_start_timeout: float = setting(
        3600.0,
        "seconds that a process of the server may take to start (an engine: to load its model and be ready) before it "
        "is killed; 0: no limit",
        low=0,
    )
    engine_stall_timeout: float = setting(
        60.0, "seconds without a finished step, with work waiting, after which /health answers 503; 0: never", low=0
    )
    engine_hang_timeout: float = setting(
        300.0,
        "seconds without a finished step, with work waiting, after which the engine is restarted; 0: never",
        low=0,
    )

    @property
    def num_api_servers(self) -> int:
        """`api_server_count`, or its default. Raises ValueError while it is auto."""
        return int(self.api_server_count or self.data_parallel_size)
