"""One API server: tokenizer, `AsyncLLM`, HTTP application and server, in one process.

Does not know how the engines were started: events tell it where they are, and which are up.
"""

import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pagemill import envs
from pagemill.config.engine_config import EngineConfig
from pagemill.config.model_names import ModelNames
from pagemill.config.server_config import ServerConfig
from pagemill.errors import PagemillError
from pagemill.fleet.event_feed import follow
from pagemill.log import get_logger, name_process
from pagemill.messages.fleet import AbortOrder, DrainOrder, EngineDown, EngineUp, FleetEvent, FrontEndMessage, HaltOrder
from pagemill.messages.metrics import MetricsTotals
from pagemill.messages.process_reports import FrontEndPulse, Listening
from pagemill.observability.shared_metrics import SharedMetrics
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.balancer import BALANCERS
from pagemill.serve.client.fleet import FleetClient
from pagemill.serve.client.zmq import ZmqClient
from pagemill.serve.http.app import build_app
from pagemill.serve.http.client_limits import ClientRows
from pagemill.serve.http.limits import limits_of
from pagemill.serve.http.orders import Orders
from pagemill.serve.http.peers import Peers
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.preparer_process import HelperSpec
from pagemill.serve.http.server import announce_ready, serve
from pagemill.serve.http.tls import Tls
from pagemill.serve.load_gate import LoadRow
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.processing.seeds import RequestSeeds
from pagemill.tokenizers.interface import Tokenizer
from pagemill.tokenizers.load import tokenizer_of
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.liveness import Introductions
from pagemill.transport.shm_load import SharedLoad
from pagemill.utils.children import start_heartbeat
from pagemill.utils.gc_pause import gc_paused
from pagemill.utils.processes import Report

logger = get_logger(__name__)

PULSE_S = 1.0


class ApiServerSpec(msgspec.Struct, frozen=True):
    """What an API server is given; the payload of one in a process of its own."""

    config: EngineConfig
    server: ServerConfig
    index: int
    num_engines: int
    balancer: str
    secret: str
    """Lets it connect to the engines."""
    feed: str = ""
    """Address of the feed of events, for a process of its own."""
    socket_fd: int = -1
    """The bound HTTP socket, for a process of its own."""
    peers: list[str] = []
    """Paths of the sockets on which API servers in processes of their own ask each other for what they have stored."""
    load_fd: int = -1
    """Memory with the load of all front ends (transport/shm_load.py), for a process of its own."""

    def hello(self) -> Hello:
        """How it introduces itself to engines and to the feed of events."""
        return Hello(secret=self.secret, role=Role.API_SERVER, index=self.index)


def make_fleet(spec: ApiServerSpec, ups: Sequence[EngineUp]) -> FleetClient:
    """The client of all engines."""
    introductions = Introductions(spec.hello())
    return FleetClient(
        lambda up: ZmqClient(up, introductions.next()), ups, BALANCERS[spec.balancer](), num_engines=spec.num_engines
    )


def serve_fleet(
    spec: ApiServerSpec,
    fleet: FleetClient,
    tokenizer: Tokenizer,
    sock: socket.socket,
    announce: Callable[[str], None] = announce_ready,
) -> None:
    """Serve over HTTP on a bound socket until SIGINT or SIGTERM, then drain: as the only API server of its engines."""
    server = spec.server
    with gc_paused():
        llm = _make_llm(spec, fleet, tokenizer)
        app = build_app(llm, server, helpers=_make_helpers(spec, fleet), secret=spec.secret, info=_info(spec))
    serve(
        app, sock, server.uvicorn_log_level, llm, server.shutdown_timeout, announce, limits_of(server), Tls.of(server)
    )


def _given_name(spec: ApiServerSpec) -> str | None:
    """The name of the model in metrics; None: nobody has given it one."""
    server = spec.server
    return ModelNames.of(server, spec.config.facts.name).served[0] if server.served_model_name else None


def _info(spec: ApiServerSpec) -> dict[str, Any]:
    """The settings, but for keys."""
    server = dataclasses.asdict(spec.server)
    del server["api_key"]
    return {**dataclasses.asdict(spec.config), "server": server}


def _make_llm(spec: ApiServerSpec, fleet: FleetClient, tokenizer: Tokenizer) -> AsyncLLM:
    """The `AsyncLLM` over a client of all engines."""
    config = spec.config
    return AsyncLLM(
        fleet,
        tokenizer,
        config.facts,
        config.scheduler,
        cache=config.cache,
        served_model_name=_given_name(spec),
        log_interval_s=envs.log_stats_interval_s(),
        log_stats=not config.observability.disable_log_stats,
        seeds=RequestSeeds(config.model.seed, spec.index),
        pooler=config.model.pooler_config if config.model.pools else None,
    )


def _make_helpers(spec: ApiServerSpec, fleet: FleetClient) -> PreparerPool:
    """The pool of processes that parse large bodies; none is started before it is needed."""
    config = spec.config
    return PreparerPool(
        HelperSpec(
            model=config.model,
            facts=config.facts,
            scheduler=config.scheduler,
            ready=fleet.ready,
            num_engines=fleet.num_engines,
            model_names=ModelNames.of(spec.server, config.facts.name),
            parsers=ParserSettings.of(spec.server),
        )
    )


class FirstUps:
    """Keeps the first events until a listener takes them over, and waits in them for engines that are up."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._events: list[FleetEvent | HaltOrder | DrainOrder] = []
        self._changed = threading.Condition()
        self._listener: Callable[[FrontEndMessage], None] | None = None

    def __call__(self, event: FrontEndMessage) -> None:
        """Keep an event, or pass it on once there is a listener."""
        with self._changed:
            if self._listener is not None:
                self._listener(event)
                return
            if isinstance(event, (MetricsTotals, AbortOrder)):
                return  # for nobody: this process has neither asked, nor any request
            self._events.append(event)
            self._changed.notify_all()

    def wait(self) -> list[EngineUp]:
        """Wait until the state of every engine is known and one is up; those that are. An API server that is started
        again may find others down, or gone for good."""
        with self._changed:
            while not self._ups() or len(self._latest()) < self._num_engines:
                self._changed.wait()
            return self._ups()

    def hand_over(self, listener: Callable[[FrontEndMessage], None]) -> None:
        """Call the listener with the events kept so far, and with all later ones."""
        with self._changed:
            for event in self._events:
                listener(event)
            self._listener = listener

    def _ups(self) -> list[EngineUp]:
        return [event for event in self._latest().values() if isinstance(event, EngineUp)]

    def _latest(self) -> dict[int, EngineUp | EngineDown]:
        return {event.index: event for event in self._events if isinstance(event, (EngineUp, EngineDown))}


def run(payload: bytes, report: Report) -> None:
    """Entry of an API server in a process of its own (utils/processes.py)."""
    spec = msgspec.msgpack.decode(payload, type=ApiServerSpec)
    name_process(f"api {spec.index}")
    pulse = msgspec.msgpack.encode(FrontEndPulse())
    start_heartbeat(lambda: report(pulse), PULSE_S)
    ups = FirstUps(spec.num_engines)
    follow(spec.feed, spec.hello(), ups)
    tokenizer = _load_tokenizer(spec.config)
    fleet = make_fleet(spec, ups.wait())
    llm = _make_llm(spec, fleet, tokenizer)
    load = SharedLoad(spec.load_fd)
    llm.share_load(LoadRow(load, spec.index))
    metrics = SharedMetrics(llm.metrics, spec.index, lambda counts: report(msgspec.msgpack.encode(counts)))
    orders = Orders(llm, lambda order: report(msgspec.msgpack.encode(order)))

    def take(message: FrontEndMessage) -> None:
        match message:
            case MetricsTotals():
                metrics.take(message)
            case AbortOrder() | DrainOrder():
                orders.take(message)
            case _:
                fleet.notify(message)

    ups.hand_over(take)

    def announce(url: str) -> None:
        report(msgspec.msgpack.encode(Listening()))

    server = spec.server
    sock = socket.socket(fileno=spec.socket_fd)
    with gc_paused():
        app = build_app(
            llm,
            server,
            metrics=metrics,
            helpers=_make_helpers(spec, fleet),
            secret=spec.secret,
            info=_info(spec),
            orders=orders,
            clients=ClientRows(load, spec.index),
            peers=Peers(spec.peers, spec.index),
        )
    serve(
        app, sock, server.uvicorn_log_level, llm, server.shutdown_timeout, announce, limits_of(server), Tls.of(server)
    )


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer; ends the process where it cannot be loaded, as when files are gone since the first start: the
    process is then started again later."""
    try:
        return tokenizer_of(config.model, config.facts)
    except PagemillError as error:
        logger.error("this API server cannot start: %s", error)
        raise SystemExit(1) from None
