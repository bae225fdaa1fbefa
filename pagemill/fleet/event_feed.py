"""What becomes of the engines, told to front ends in other processes: `EventFeed` at one end, `follow` at the other.

Does not know who runs the engines or adds up metrics, nor what a front end does with the events.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from pagemill.errors import HandshakeError, PeerGoneError, TransportError
from pagemill.fleet.engine_states import EngineStates
from pagemill.log import get_logger
from pagemill.messages.fleet import FrontEndMessage
from pagemill.transport.codec import Codec, Frame
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.liveness import Introductions
from pagemill.transport.sockets import ClientSocket, Peer, ServerSocket
from pagemill.utils.backoff import Backoff
from pagemill.utils.queues import waiting_items

logger = get_logger(__name__)

POLL_S = 5.0
CONNECT_S = 30.0
SUBSCRIBE = [b"subscribe"]
_EVENTS: Codec[FrontEndMessage] = Codec(FrontEndMessage)


class EventFeed:
    """Tells every front end that asks: first the present state of each engine, then every event."""

    def __init__(self, address: str, secret: str) -> None:
        self._socket = ServerSocket(address, secret, accepts=(Role.API_SERVER,))
        self.address = self._socket.address
        self._events: SimpleQueue[FrontEndMessage] = SimpleQueue()
        self._states = EngineStates()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pagemill-feed", daemon=True)
        self._thread.start()

    def publish(self, event: FrontEndMessage) -> None:
        """Tell all. From any thread, never blocks."""
        self._events.put(event)
        self._socket.wake()

    def close(self) -> None:
        """Stop publishing, and end the thread that does."""
        self._closing = True
        self._socket.wake()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._closing:
            received = self._socket.receive(POLL_S)
            if received is not None:
                subscriber, _ = received
                for event in (*self._states.orders(), *self._states.events()):
                    self._send(subscriber, event)
            self._send_events()

    def _send_events(self) -> None:
        for event in waiting_items(self._events):
            self._states.note(event)
            for subscriber in self._socket.peers:
                self._send(subscriber, event)

    def _send(self, subscriber: Peer, event: FrontEndMessage) -> None:
        try:
            self._socket.send(subscriber, _EVENTS.encode(event))
        except PeerGoneError:
            logger.debug("%s is gone", subscriber)


def follow(address: str, hello: Hello, listener: Callable[[FrontEndMessage], None]) -> None:
    """Subscribe, and call the listener with every event on a thread of its own, for the life of the process.

    Raises HandshakeError when nobody answers.
    """
    introductions = Introductions(hello)

    def connect() -> ClientSocket:
        """Subscribe. The present state is the first thing that is told: what happened meanwhile is not lost."""
        socket = ClientSocket(address, introductions.next(), timeout_s=CONNECT_S)
        socket.send(SUBSCRIBE)
        return socket

    def reconnect() -> ClientSocket:
        backoff = Backoff()
        while True:
            try:
                return connect()
            except (HandshakeError, PeerGoneError) as error:
                logger.warning("the feed of events is not there: %s", error)
                time.sleep(backoff.next_s())

    socket = connect()

    def listen() -> None:
        nonlocal socket
        while True:
            try:
                frames = socket.receive(POLL_S)
            except PeerGoneError as error:
                logger.warning("%s; connecting again", error)
                socket.close()
                socket = reconnect()
                continue
            if frames is not None:
                _deliver(frames, listener)

    threading.Thread(target=listen, name="pagemill-follow", daemon=True).start()


def _deliver(frames: list[Frame], listener: Callable[[FrontEndMessage], None]) -> None:
    try:
        listener(_EVENTS.decode(frames))
    except TransportError as error:
        logger.warning("dropped a message of the feed: %s", error)
    except Exception:  # the events that follow matter more
        logger.exception("a message of the feed could not be used")
