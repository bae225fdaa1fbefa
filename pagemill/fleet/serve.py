"""`serve`: the life of `pagemill serve`, in the order in which everything is started and ended.

Does not know how a configuration is completed (launch.py), nor how a child process is watched (supervisor.py).
"""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import setproctitle

from pagemill import envs
from pagemill.config.arguments import EngineArgs
from pagemill.config.engine_config import EngineConfig
from pagemill.config.fleet_plan import FleetPlan, plan_fleet
from pagemill.config.sections import FleetConfig, ServerConfig
from pagemill.config.server_access import access_of, is_loopback
from pagemill.errors import ConfigError, EngineDeadError
from pagemill.fleet.engines import EngineFleet
from pagemill.fleet.event_feed import EventFeed
from pagemill.fleet.node import run_headless
from pagemill.fleet.supervisor import LivenessTimeouts
from pagemill.launch import WORKER, build_config, log_ready
from pagemill.log import get_logger
from pagemill.observability.metrics_pool import MetricsPool
from pagemill.serve.http.server import bind, say_ready, url_of
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.tokenizers.load import tokenizer_of
from pagemill.utils.descriptors import raise_limit
from pagemill.utils.signals import no_sudden_end
from pagemill.utils.timing import PhaseTimer

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
    secret = _shared_secret(plan)
    if not plan.headless:
        server = _with_keys(server)
        ParserSettings.of(server)  # what is wrong with it is said before an engine is started
    raise_limit()
    config = build_config(args, plan)
    envs.log_stats_interval_s()  # for front ends that are not there yet
    timeouts = LivenessTimeouts(
        fleet.engine_stall_timeout, fleet.engine_hang_timeout, start_s=fleet.engine_start_timeout
    )
    timeout_s = fleet.data_parallel_node_timeout
    if plan.headless:
        return run_headless(config, WORKER, plan, timeouts, secret=secret, node_timeout_s=timeout_s)
    with (
        _ended_by_signals(),
        contextlib.closing(bind(server.host, server.port)) as sock,
        EngineFleet(
            config,
            WORKER,
            plan,
            timeouts,
            secret=secret,
            node_timeout_s=timeout_s,
            on_lost=_end_this_process,
        ) as engines,
    ):
        engines.start()
        serve_here = _serve_in_this_process if fleet.num_api_servers == 1 else _serve_in_others
        serve_here(config, server, fleet, engines, sock)
        _ignore_signals()
    return 1 if engines.lost else 0


def _with_keys(server: ServerConfig) -> ServerConfig:
    """With the key of the environment, where none is given. Raises ConfigError for settings that let nobody in, or
    everybody by mistake."""
    access = access_of(server)
    if not access.api_keys and not is_loopback(server.host):
        logger.warning("anybody who reaches %s can use this server: it has no --api-key", server.host)
    return dataclasses.replace(server, api_key=access.api_keys or None)


class _ToldToEnd(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT end the body where it is, and what it opened is closed: for the time of start-up, before
    servers have handlers of their own. While things are closed, further ones are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        _ignore_signals()
        raise KeyboardInterrupt if number == signal.SIGINT else _ToldToEnd

    previous = {number: signal.signal(number, end) for number in _ENDING}
    try:
        with contextlib.suppress(_ToldToEnd):
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """From now on everything is closed, within seconds: whoever cut that short would leave folders and processes."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)


def _end_this_process() -> None:
    """From any thread: as if somebody else had told it to."""
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_in_this_process(
    config: EngineConfig, server: ServerConfig, fleet: FleetConfig, engines: EngineFleet, sock: socket.socket
) -> None:
    """One front end: it is this process, which supervises the engines too."""
    # deferred: fastapi is imported while the engines start
    from pagemill.fleet.api_server import ApiServerSpec, make_fleet, serve_fleet

    setproctitle.setproctitle("pagemill: api server 0")
    timer = PhaseTimer()
    with timer.phase("tokenizer"):
        tokenizer = tokenizer_of(config.model, config.facts)
    with timer.phase("engine"):
        ups = engines.wait_ready()
    birth = ApiServerSpec(config, server, 0, len(ups), fleet.data_parallel_balancer, engines.secret)
    client = make_fleet(birth, ups)
    engines.subscribe(client.notify)
    log_ready(config, ups[0].ready, timer)
    serve_fleet(birth, client, tokenizer, sock)
    engines.unsubscribe(client.notify)


def _serve_in_others(
    config: EngineConfig, server: ServerConfig, fleet: FleetConfig, engines: EngineFleet, sock: socket.socket
) -> None:
    """Several front ends, in processes of their own on one socket; this process supervises them and the engines."""
    # deferred: fastapi is imported while the engines start
    from pagemill.fleet.api_server import ApiServerSpec
    from pagemill.fleet.api_server_pool import ApiServerPool

    setproctitle.setproctitle("pagemill: dp coordinator" if fleet.data_parallel_size > 1 else "pagemill: supervisor")
    feed = EventFeed(engines.folder.ipc("feed"), engines.secret)
    pool = MetricsPool(fleet.data_parallel_size, feed.publish)
    for listener in (feed.publish, pool.note):
        engines.subscribe(listener)
    common = (fleet.data_parallel_size, fleet.data_parallel_balancer, engines.secret, feed.address, sock.fileno())
    servers = ApiServerPool(
        fleet.num_api_servers,
        lambda index: ApiServerSpec(config, server, index, *common),
        sock,
        lambda: list(engines.addresses().values()),
        pool,
        start_s=fleet.engine_start_timeout,
        on_lost=_end_this_process,
    )
    timer = PhaseTimer()
    servers.start()
    try:
        with timer.phase("engines"):
            ups = engines.wait_ready()
        with timer.phase("front ends"):
            servers.wait_listening()
        log_ready(config, ups[0].ready, timer)
        told = _StopSignals()
        say_ready(url_of(sock))
        told.wait()
        servers.stop(server.shutdown_timeout + CLOSING_S, hurry=told.again)
        if servers.lost:
            raise EngineDeadError("no api server is left, and none could be started again")
    finally:
        servers.stop(0.0)
        sock.close()  # from now on nobody answers
        for listener in (feed.publish, pool.note):
            engines.unsubscribe(listener)
        feed.close()


class _StopSignals:
    """The first SIGINT or SIGTERM asks to drain, the second to end at once."""

    def __init__(self) -> None:
        # Not an Event: a handler that interrupts its `wait` at the wrong moment would wait for the lock forever.
        self._signals: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._signals.put(number))

    def wait(self) -> None:
        """For the first one."""
        self._signals.get()

    def again(self) -> bool:
        """Whether another one came since."""
        return not self._signals.empty()


def _shared_secret(plan: FleetPlan) -> str:
    """What the machines of a server share; one machine draws its own. Raises ConfigError when it was not set."""
    if plan.head is None:
        return ""
    secret = envs.ipc_secret()
    if secret is None:
        raise ConfigError(
            "PAGEMILL_IPC_SECRET is not set: the machines of one server need the same secret, of your choice, in it"
        )
    return secret
