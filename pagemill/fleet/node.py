"""A headless node: engines for a head on another machine, which has the API servers.

Does not know who uses the engines: it reports to the head where they are, and what becomes of them. The other side is
head.py.
"""

import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import setproctitle

from pagemill.errors import (
    ConfigError,
    EngineDeadError,
    HandshakeError,
    NoAnswerError,
    NotLetInError,
    PagemillError,
    PeerGoneError,
    TransportError,
)
from pagemill.fleet.engine_states import EngineStates
from pagemill.fleet.engines import EngineFleet, FleetSpec, shared_settings
from pagemill.fleet.head import name_ranks
from pagemill.log import get_logger
from pagemill.messages.fleet import EngineDown, FleetEvent
from pagemill.messages.nodes import (
    HeadGoodbye,
    HeadMessage,
    NodeGoodbye,
    NodeHello,
    NodeMessage,
    NodeMustWait,
    NodePulse,
    NodeRefused,
    NodeWelcome,
)
from pagemill.transport.addresses import ip_of, tcp_address
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.liveness import Introductions
from pagemill.transport.sockets import ClientSocket
from pagemill.utils.awake_clock import AwakeClock
from pagemill.utils.queues import waiting_items

logger = get_logger(__name__)

POLL_S = 0.1
PULSE_S = 0.5
FIRST_CONNECT_S = 300.0
"""How long a node waits for a head that is not there yet."""
HEAD_RETURN_S = 300.0
"""How long it keeps its engines for a head that is gone without a word."""
MAX_SHUT_OUT = 5
"""Times that a head may listen and not answer a node that it never let in, before the secret is taken for wrong."""
TRY_S = 1.0
"""What one attempt to connect may take."""
PAUSE_S = 0.2
"""Between attempts to connect."""
WAIT_PAUSE_S = 1.0
"""Between attempts while the head tells this node to wait."""
WAIT_MARGIN_S = 5.0
"""How much longer than it takes the head to notice that another node is gone, twice, this node waits for that."""
MAX_GAP_S = 3.0
"""Between two looks at the head. A longer gap tells that this process itself did not run."""


class HeadConnection:
    """The connection to the head. One thread calls `connect` and `run`; any thread may call `publish`, `fail`, `stop`.

    A connection that was lost, or silent for half of `timeout_s` seconds, is made again, and the head told the present
    state; a head that does not come back within `return_s` seconds is given up.
    """

    def __init__(
        self, address: str, secret: str, hello: NodeHello, timeout_s: float, return_s: float = HEAD_RETURN_S
    ) -> None:
        self._address = address
        self._hello = hello
        self._timeout_s = timeout_s
        self._return_s = return_s
        self._introductions = Introductions(Hello(secret=secret, role=Role.NODE, index=hello.first_rank))
        self._outgoing: Codec[NodeMessage] = Codec(NodeMessage)
        self._incoming: Codec[HeadMessage] = Codec(HeadMessage)
        self._events: SimpleQueue[FleetEvent] = SimpleQueue()
        self._states = EngineStates()
        self._socket: ClientSocket | None = None
        self._clock = AwakeClock(MAX_GAP_S)
        self._last_heard = 0.0
        self._waits_until: float | None = None
        """When this node stops waiting for another that has its engines; None: it does not wait."""
        self._was_welcome = False
        self._stopping = False
        self._failure: PagemillError | None = None

    def publish(self, event: FleetEvent) -> None:
        """Tell the head of an event."""
        self._events.put(event)

    def fail(self, error: PagemillError) -> None:
        """End `run` with this error."""
        self._failure = error
        self._stopping = True

    def stop(self) -> None:
        """Let `run` return soon."""
        self._stopping = True

    def connect(self, within_s: float) -> None:
        """Introduce this node, and wait while the head tells it to. Raises ConfigError when the head refuses it,
        EngineDeadError when nobody answers within `within_s` seconds."""
        deadline = self._clock.now() + within_s
        num_shut_out = 0
        while not self._stopping:
            try:
                self._socket = ClientSocket(self._address, self._introductions.next(), timeout_s=TRY_S)
            except NoAnswerError as error:
                num_shut_out += isinstance(error, NotLetInError)
                if num_shut_out >= MAX_SHUT_OUT and not self._was_welcome:
                    raise ConfigError(f"this node cannot join: {error} (PAGEMILL_IPC_SECRET)") from error
                if self._clock.now() > deadline:
                    raise EngineDeadError(f"there is no head at {self._address}: {error}") from error
                self._send_events()  # to nobody: they make the state that is told later
                time.sleep(PAUSE_S)
                continue
            except HandshakeError as error:
                raise ConfigError(f"this node cannot join: {error}") from error
            self._send(self._hello)
            if self._is_welcome():
                self._was_welcome = True
                self._waits_until = None
                self._last_heard = self._clock.now()
                for event in self._states.events():
                    self._send(event)
                return
            self.close()

    @property
    def stopping(self) -> bool:
        """Whether `stop` or `fail` was called."""
        return self._stopping

    def run(self) -> None:
        """Report to the head until it ends, or `stop`. Raises EngineDeadError when it is gone without a word, and what
        `fail` was given."""
        next_pulse = 0.0
        while not self._stopping:
            self._send_events()
            if time.monotonic() >= next_pulse:
                self._send(NodePulse())
                next_pulse = time.monotonic() + PULSE_S
            if isinstance(self._next_answer(POLL_S), HeadGoodbye):
                logger.info("the head has ended")
                return
            if self._clock.now() - self._last_heard > self._timeout_s / 2:
                self._reconnect()
        self._send(NodeGoodbye(str(self._failure or "it was told to stop")))
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _reconnect(self) -> None:
        logger.warning("the head cannot be reached; connecting anew, for %g s", self._return_s)
        self.close()
        self.connect(self._return_s)
        if not self._stopping:
            logger.info("the head is there again")

    def _is_welcome(self) -> bool:
        """Whether the head takes this node; False when it does not answer, or tells it to wait. Raises ConfigError when
        it refuses the node."""
        answer = self._next_answer(TRY_S)
        if isinstance(answer, NodeRefused):
            raise ConfigError(f"the head refused this node: {answer.reason}")
        if isinstance(answer, NodeMustWait):
            self._wait(answer.reason)
        return isinstance(answer, NodeWelcome)

    def _wait(self, reason: str) -> None:
        """Pause before the next attempt. Raises ConfigError when the other node is alive: it has not become silent for
        twice as long as the head would notice."""
        now = self._clock.now()
        if self._waits_until is None:
            wait_s = 2 * self._timeout_s + WAIT_MARGIN_S
            self._waits_until = now + wait_s
            logger.warning("this node waits for up to %g s: %s", wait_s, reason)
        if now > self._waits_until:
            raise ConfigError(f"the head refused this node: {reason}")
        self.close()
        self._send_events()  # to nobody, as above
        time.sleep(WAIT_PAUSE_S)

    def _send_events(self) -> None:
        for event in waiting_items(self._events):
            self._states.note(event)
            if isinstance(event, EngineDown):
                self._fail_without_engines()
            self._send(event)

    def _fail_without_engines(self) -> None:
        """End `run` once all engines of this node are gone for good."""
        finals = [event for event in self._states.events() if isinstance(event, EngineDown) and event.final]
        if len(finals) == self._hello.num_ranks:
            self.fail(EngineDeadError(f"no engine of this node is left: {finals[0].reason}"))

    def _send(self, message: NodeMessage) -> None:
        if self._socket is not None:
            try:
                self._socket.send(self._outgoing.encode(message))
            except PeerGoneError as error:  # `run` notices by its silence
                logger.debug("%s", error)

    def _next_answer(self, timeout_s: float) -> HeadMessage | None:
        try:
            frames = None if self._socket is None else self._socket.receive(timeout_s)
        except PeerGoneError as error:
            logger.warning("%s", error)
            self.close()
            self._last_heard = -math.inf  # `run` connects anew at once
            return None
        if frames is None:
            return None
        self._last_heard = self._clock.now()
        try:
            return self._incoming.decode(frames)
        except TransportError as error:
            logger.warning("dropped a message of the head: %s", error)
            return None


def run_headless(spec: FleetSpec, *, head_return_s: float = HEAD_RETURN_S) -> int:
    """Run this machine's engines for the head until it ends, or SIGINT or SIGTERM; the exit status.

    Raises ConfigError when the head refuses this node, EngineDeadError when it is gone for `head_return_s` seconds, and
    what keeps the engines from starting.
    """
    plan = spec.plan
    if plan.head is None or spec.secret is None:
        raise ConfigError("a headless node needs the address of a head, and the secret that they share")
    setproctitle.setproctitle(f"pagemill: node (engines {name_ranks(plan.local)})")
    address = tcp_address(ip_of(plan.head[0]), plan.head[1])
    head = HeadConnection(address, spec.secret, _introduction(spec), spec.node_timeout_s, head_return_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: head.stop())
    logger.info("engines %s, for the head at %s", name_ranks(plan.local), address)
    try:
        head.connect(FIRST_CONNECT_S)
        if head.stopping:
            return 0
        with EngineFleet(spec) as engines:
            engines.subscribe(head.publish)
            engines.start()
            threading.Thread(target=_watch_start, args=(engines.wait_ready, head), daemon=True).start()
            head.run()
    finally:
        head.close()
    return 0


def _introduction(spec: FleetSpec) -> NodeHello:
    plan = spec.plan
    return NodeHello(
        node_id=secrets.token_hex(8),
        name=f"{socket.gethostname()}:{os.getpid()}",
        size=plan.size,
        first_rank=plan.local.start,
        num_ranks=len(plan.local),
        settings=shared_settings(spec.config),
    )


def _watch_start(wait_ready: Callable[[], object], head: HeadConnection) -> None:
    """End the node when an engine cannot start."""
    try:
        wait_ready()
    except PagemillError as error:
        head.fail(error)
    else:
        logger.info("the engines of this node are ready")
