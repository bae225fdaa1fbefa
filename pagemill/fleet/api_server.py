"""A front end of a deployment: tokenizer, `AsyncLLM`, HTTP application and server, in one process.

Does not know how the engines were started: it is told where they are, and what becomes of them.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from pagemill import envs
from pagemill.config.engine_config import EngineConfig
from pagemill.config.sections import ServerConfig
from pagemill.errors import PagemillError
from pagemill.fleet.event_feed import follow
from pagemill.log import get_logger, name_process
from pagemill.messages.fleet import EngineDown, EngineUp, FleetEvent, FrontEndNews
from pagemill.messages.metrics import MetricsTotals
from pagemill.messages.process_reports import FrontEndPulse, Listening
from pagemill.observability.shared_metrics import SharedMetrics
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.balancer import BALANCERS
from pagemill.serve.client.fleet import FleetClient
from pagemill.serve.client.zmq import ZmqClient
from pagemill.serve.http.app import build_app
from pagemill.serve.http.limits import limits_of
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.preparer_process import HelperSpec
from pagemill.serve.http.server import say_ready, serve
from pagemill.serve.load_gate import LoadRow
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.processing.seeds import RequestSeeds
from pagemill.tokenizers.interface import Tokenizer
from pagemill.tokenizers.load import tokenizer_of
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.liveness import Introductions
from pagemill.transport.shm_load import SharedLoad
from pagemill.utils.collector import paused
from pagemill.utils.processes import Report

logger = get_logger(__name__)

PULSE_S = 1.0


class ApiServerSpec(msgspec.Struct, frozen=True):
    """What a front end is given. In a process of its own, this is its payload."""

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
    load_fd: int = -1
    """Memory with the load of all front ends (transport/shm_load.py), for a process of its own."""

    def hello(self) -> Hello:
        """How it introduces itself."""
        return Hello(secret=self.secret, role=Role.API_SERVER, index=self.index)


def make_fleet(birth: ApiServerSpec, ups: Sequence[EngineUp]) -> FleetClient:
    """The client of all engines."""
    introductions = Introductions(birth.hello())
    return FleetClient(
        lambda up: ZmqClient(up, introductions.next()), ups, BALANCERS[birth.balancer](), num_engines=birth.num_engines
    )


def serve_fleet(
    birth: ApiServerSpec,
    fleet: FleetClient,
    tokenizer: Tokenizer,
    sock: socket.socket,
    announce: Callable[[str], None] = say_ready,
) -> None:
    """Serve over HTTP on a bound socket until SIGINT or SIGTERM, then drain. The only front end of its engines."""
    server = birth.server
    with paused():
        llm = _make_llm(birth, fleet, tokenizer)
        app = build_app(llm, server, helpers=_make_helpers(birth, fleet), secret=birth.secret)
    serve(app, sock, server.uvicorn_log_level, llm, server.shutdown_timeout, announce, limits_of(server))


def _make_llm(birth: ApiServerSpec, fleet: FleetClient, tokenizer: Tokenizer) -> AsyncLLM:
    """Prompts to outputs, over the client."""
    config = birth.config
    llm = AsyncLLM(
        fleet,
        tokenizer,
        config.facts,
        config.scheduler,
        cache=config.cache,
        served_model_name=birth.server.served_model_name,
        log_interval_s=envs.log_stats_interval_s(),
        log_stats=not config.observability.disable_log_stats,
        seeds=RequestSeeds(config.model.seed, birth.index),
        pooler=config.model.pooler_config if config.model.pools else None,
    )
    if birth.load_fd >= 0:
        llm.share_load(LoadRow(SharedLoad(birth.load_fd), birth.index))
    return llm


def _make_helpers(birth: ApiServerSpec, fleet: FleetClient) -> PreparerPool:
    """For large bodies; no process is started yet."""
    config = birth.config
    return PreparerPool(
        HelperSpec(
            model=config.model,
            facts=config.facts,
            scheduler=config.scheduler,
            ready=fleet.ready,
            num_engines=fleet.num_engines,
            served_model_name=birth.server.served_model_name or config.facts.name,
            parsers=ParserSettings.of(birth.server),
        )
    )


class FirstUps:
    """Waits until something is known of every engine, and one is up; later events go to a listener."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._events: list[FleetEvent] = []
        self._changed = threading.Condition()
        self._listener: Callable[[FrontEndNews], None] | None = None

    def __call__(self, event: FrontEndNews) -> None:
        """Take an event."""
        with self._changed:
            if self._listener is not None:
                self._listener(event)
                return
            if isinstance(event, MetricsTotals):
                return  # nobody here has asked yet
            self._events.append(event)
            self._changed.notify_all()

    def wait(self) -> list[EngineUp]:
        """The engines that are up. A front end that is started again may find others down, or gone for good."""
        with self._changed:
            while not self._ups() or len(self._latest()) < self._num_engines:
                self._changed.wait()
            return self._ups()

    def hand_over(self, listener: Callable[[FrontEndNews], None]) -> None:
        """Give the listener what came so far, and all that will come."""
        with self._changed:
            for event in self._events:
                listener(event)
            self._listener = listener

    def _ups(self) -> list[EngineUp]:
        return [event for event in self._latest().values() if isinstance(event, EngineUp)]

    def _latest(self) -> dict[int, EngineUp | EngineDown]:
        return {event.index: event for event in self._events if isinstance(event, (EngineUp, EngineDown))}


def run(payload: bytes, report: Report) -> None:
    """Entry of a front end in a process of its own (utils/processes.py)."""
    birth = msgspec.msgpack.decode(payload, type=ApiServerSpec)
    name_process(f"api {birth.index}")
    threading.Thread(target=_pulse, args=(report,), name="pagemill-pulse", daemon=True).start()
    ups = FirstUps(birth.num_engines)
    follow(birth.feed, birth.hello(), ups)
    tokenizer = _load_tokenizer(birth.config)
    fleet = make_fleet(birth, ups.wait())
    llm = _make_llm(birth, fleet, tokenizer)
    metrics = SharedMetrics(llm.metrics, birth.index, lambda counts: report(msgspec.msgpack.encode(counts)))
    ups.hand_over(lambda news: metrics.take(news) if isinstance(news, MetricsTotals) else fleet.notify(news))

    def tell(url: str) -> None:
        report(msgspec.msgpack.encode(Listening()))

    server, sock = birth.server, socket.socket(fileno=birth.socket_fd)
    with paused():
        app = build_app(llm, server, metrics=metrics, helpers=_make_helpers(birth, fleet), secret=birth.secret)
    serve(app, sock, server.uvicorn_log_level, llm, server.shutdown_timeout, tell, limits_of(server))


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    """When this process is started again, files may be gone that were there before; it is tried again later then."""
    try:
        return tokenizer_of(config.model, config.facts)
    except PagemillError as error:
        logger.error("this API server cannot start: %s", error)
        raise SystemExit(1) from None


def _pulse(report: Report) -> None:
    content = msgspec.msgpack.encode(FrontEndPulse())
    while True:
        report(content)
        time.sleep(PULSE_S)
