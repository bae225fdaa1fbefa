"""`serve`: the life of `pagemill serve`, in the order in which everything is started and ended.

Does not know how a configuration is completed (launch.py), nor how a child process is watched (supervisor.py).
"""

import contextlib
import dataclasses
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import setproctitle

from pagemill import envs
from pagemill.config.arguments import EngineArgs
from pagemill.config.fleet_config import FleetConfig
from pagemill.config.fleet_plan import FleetPlan, api_servers_for, plan_fleet
from pagemill.config.model_names import ModelNames
from pagemill.config.server_access import access_of, is_loopback
from pagemill.config.server_config import ServerConfig
from pagemill.config.server_logs import ServerLogs
from pagemill.errors import ConfigError, EngineDeadError
from pagemill.fleet.engines import EngineFleet, FleetSpec
from pagemill.fleet.event_feed import EventFeed
from pagemill.fleet.node import run_headless
from pagemill.fleet.supervisor import LivenessTimeouts
from pagemill.launch import WORKER, build_config, log_ready
from pagemill.log import get_logger
from pagemill.observability.metrics_pool import MetricsPool
from pagemill.platforms.choose import choose_platform
from pagemill.serve.http.own_middleware import own_middleware
from pagemill.serve.http.root_path import root_path_of
from pagemill.serve.http.server import announce_ready, bind, bind_unix, url_of
from pagemill.serve.http.tls import Tls
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.tokenizers.load import tokenizer_of
from pagemill.utils.containers import container
from pagemill.utils.descriptors import raise_limit
from pagemill.utils.signals import end_this_process, no_sudden_end
from pagemill.utils.timing import PhaseTimer

if TYPE_CHECKING:
    from pagemill.fleet.api_server_pool import ApiServerPool

logger = get_logger(__name__)

CLOSING_S = 5.0
"""What API servers get to close after they have drained."""
_ENDING = (signal.SIGINT, signal.SIGTERM)


@no_sudden_end()
def serve(args: EngineArgs, server: ServerConfig, fleet: FleetConfig) -> int:
    """Serve over HTTP until SIGINT, SIGTERM or SIGHUP; the exit status, which is 1 when all engines are gone for good.
    Wrong settings, a model that is not there and a port in use are found, in this order, before the weights are loaded.
    Engines run in processes of their own."""
    plan = plan_fleet(fleet, expert_parallel=args.settings.parallel.enable_expert_parallel)
    fleet = _with_api_servers(fleet, args)
    secret = _shared_secret(plan)
    if not plan.headless:
        server = _with_keys(server)
        Tls.of(server)
        ServerLogs.of(server)  # raises for switches that contradict each other
        root_path_of(server.root_path)  # raises for what is no path
        own_middleware(server.middleware)  # raises for what cannot be imported
        ParserSettings.of(server)  # raises for settings of parsers that cannot work, before an engine is started
    raise_limit()
    envs.leave_tokenizers_one_thread()  # texts come one by one
    config = build_config(args, plan)
    if not plan.headless:
        ModelNames.of(server, config.facts.name)  # raises too
    spec = FleetSpec(
        config,
        WORKER,
        plan,
        LivenessTimeouts(fleet.engine_stall_timeout, fleet.engine_hang_timeout, start_s=fleet.engine_start_timeout),
        secret,
        node_timeout_s=fleet.data_parallel_node_timeout,
    )
    envs.log_stats_interval_s()  # raises now, and not in API servers that start later
    if plan.headless:
        return run_headless(spec)
    with (
        _ended_by_signals(),
        _bound(server) as sock,
        EngineFleet(spec, on_lost=end_this_process) as engines,
    ):
        engines.start()
        serve_here = _serve_in_this_process if fleet.num_api_servers == 1 else _serve_in_others
        serve_here(spec, server, fleet, engines, sock)
        _ignore_signals()
    return 1 if engines.lost else 0


def _with_api_servers(fleet: FleetConfig, args: EngineArgs) -> FleetConfig:
    """The settings with a number where they say auto."""
    if fleet.api_server_count != "auto":
        return fleet
    number = api_servers_for(fleet, choose_platform(args.settings.device.device).facts())
    logger.info("api_server_count = %d (auto: the engines' device and the cores of this machine)", number)
    return dataclasses.replace(fleet, api_server_count=number)


@contextlib.contextmanager
def _bound(server: ServerConfig) -> Iterator[socket.socket]:
    """The socket to listen on. Raises ConfigError."""
    if server.uds is None:
        with contextlib.closing(bind(server.host, server.port)) as sock:
            yield sock
        return
    with contextlib.closing(bind_unix(server.uds)) as sock:
        try:
            yield sock
        finally:
            Path(server.uds).unlink(missing_ok=True)


def _with_keys(server: ServerConfig) -> ServerConfig:
    """The settings with the API key of the environment, where none is given. Raises ConfigError for settings that let
    nobody in, or everybody by mistake."""
    access = access_of(server)
    if envs.server_dev_mode() and not access.api_keys and not is_loopback(server.host):
        raise ConfigError(
            f"PAGEMILL_SERVER_DEV_MODE=1 with --host {server.host} needs --api-key: anybody who reaches the server "
            "could end requests and read its settings"
        )
    if server.uds is not None:
        return dataclasses.replace(server, api_key=access.api_keys or None)
    if not access.api_keys and not is_loopback(server.host):
        logger.warning("anybody who reaches %s can use this server: it has no --api-key", server.host)
    if is_loopback(server.host):
        _warn_of_container(server.host)
    return dataclasses.replace(server, api_key=access.api_keys or None)


def _warn_of_container(host: str) -> None:
    """Inside a container, a loopback address is nearly always a mistake, and one that looks like a dead server."""
    runtime = container()
    if runtime is not None:
        logger.warning(
            "NOBODY OUTSIDE THIS CONTAINER (%s) CAN CONNECT: it listens on %s; to be reached from outside, start with "
            "--host 0.0.0.0 and an --api-key",
            runtime,
            host,
        )


class _Terminated(BaseException):
    """SIGTERM, as an exception."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Until the server installs handlers of its own, turn SIGTERM and SIGINT into exceptions, so that everything opened
    so far is closed. Further signals are ignored meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        _ignore_signals()
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    previous = {number: signal.signal(number, end) for number in _ENDING}
    try:
        with contextlib.suppress(_Terminated):
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT while everything is closed, which takes seconds: an end in the middle of that would
    leave folders and processes behind."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)


def _serve_in_this_process(
    spec: FleetSpec, server: ServerConfig, fleet: FleetConfig, engines: EngineFleet, sock: socket.socket
) -> None:
    """Serve with one API server: this process, which supervises the engines too."""
    # deferred: fastapi is imported while the engines start
    from pagemill.fleet.api_server import ApiServerSpec, make_fleet, serve_fleet

    setproctitle.setproctitle("pagemill: api server 0")
    config = spec.config
    timer = PhaseTimer()
    with timer.phase("tokenizer"):
        tokenizer = tokenizer_of(config.model, config.facts)
    with timer.phase("engine"):
        ups = engines.wait_ready()
    api_server = ApiServerSpec(config, server, 0, len(ups), fleet.data_parallel_balancer, engines.secret)
    client = make_fleet(api_server, ups)
    engines.subscribe(client.notify)
    log_ready(config, ups[0].ready, timer)
    serve_fleet(api_server, client, tokenizer, sock)
    engines.unsubscribe(client.notify)


def _serve_in_others(
    spec: FleetSpec, server: ServerConfig, fleet: FleetConfig, engines: EngineFleet, sock: socket.socket
) -> None:
    """Serve with several API servers, in processes of their own on one socket; this process supervises them and the
    engines."""
    # deferred: fastapi is imported while the engines start
    from pagemill.fleet.api_server import ApiServerSpec
    from pagemill.fleet.api_server_pool import ApiServerPool

    setproctitle.setproctitle("pagemill: dp coordinator" if spec.needs_coordinator else "pagemill: supervisor")
    with _event_feed(engines, fleet) as (feed, metrics):

        def api_server_spec(index: int) -> ApiServerSpec:
            return ApiServerSpec(
                spec.config,
                server,
                index,
                num_engines=fleet.data_parallel_size,
                balancer=fleet.data_parallel_balancer,
                secret=engines.secret,
                feed=feed.address,
                socket_fd=sock.fileno(),
                peers=[engines.folder.path_of(f"peer-{number}") for number in range(fleet.num_api_servers)],
            )

        pool = ApiServerPool(
            fleet.num_api_servers,
            api_server_spec,
            sock,
            lambda: list(engines.addresses().values()),
            metrics,
            feed.publish,
            num_clients=max(1, len(access_of(server).api_keys)),
            start_s=fleet.engine_start_timeout,
            on_lost=end_this_process,
        )
        try:
            _start_api_servers(spec, engines, pool)
            _run_until_signal(pool, server, sock)
        finally:
            pool.stop(0.0)
            sock.close()  # from now on connections are refused


@contextlib.contextmanager
def _event_feed(engines: EngineFleet, fleet: FleetConfig) -> Iterator[tuple[EventFeed, MetricsPool]]:
    """What API servers in other processes follow, and the sum of what they count; both fed with the engines' events."""
    feed = EventFeed(engines.folder.ipc("feed"), engines.secret)
    metrics = MetricsPool(fleet.data_parallel_size, feed.publish)
    listeners = [feed.publish, metrics.note]
    for listener in listeners:
        engines.subscribe(listener)
    try:
        yield feed, metrics
    finally:
        for listener in listeners:
            engines.unsubscribe(listener)
        feed.close()


def _start_api_servers(spec: FleetSpec, engines: EngineFleet, pool: "ApiServerPool") -> None:
    """Start the API servers, and wait until engines and API servers are ready."""
    timer = PhaseTimer()
    pool.start()
    with timer.phase("engines"):
        ups = engines.wait_ready()
    with timer.phase("API servers"):
        pool.wait_listening()
    log_ready(spec.config, ups[0].ready, timer)


def _run_until_signal(pool: "ApiServerPool", server: ServerConfig, sock: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then let the API servers drain. Raises EngineDeadError when all are given up."""
    signals = _StopSignals()
    announce_ready(url_of(sock, server.ssl_certfile is not None))
    signals.wait()
    pool.stop(server.shutdown_timeout + CLOSING_S, hurry=signals.again)
    if pool.lost:
        raise EngineDeadError("no api server is left, and none could be started again")


class _StopSignals:
    """Counts SIGINT and SIGTERM: the first asks to drain, the second to end at once."""

    def __init__(self) -> None:
        # Not an Event: a handler that interrupts its `wait` at the wrong moment would wait for the lock forever.
        self._signals: SimpleQueue[int] = SimpleQueue()
        for number in _ENDING:
            signal.signal(number, lambda number, _: self._signals.put(number))

    def wait(self) -> None:
        """Wait for the first signal."""
        self._signals.get()

    def again(self) -> bool:
        """Whether another signal came after the first."""
        return not self._signals.empty()


def _shared_secret(plan: FleetPlan) -> str | None:
    """The secret that the machines of a server share; None for one machine, which draws its own. Raises ConfigError
    when it is not set."""
    if plan.head is None:
        return None
    secret = envs.ipc_secret()
    if secret is None:
        raise ConfigError(
            "PAGEMILL_IPC_SECRET is not set: the machines of one server need the same secret, of your choice, in it"
        )
    return secret
