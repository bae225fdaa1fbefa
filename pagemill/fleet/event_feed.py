"""What becomes of the engines, told to front ends in other processes: `EventFeed` at one end, `follow` at the other.

Does not know who runs the engines or adds up metrics, nor what a front end does with the news.
"""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from pagemill.errors import HandshakeError, PeerGoneError, TransportError
from pagemill.log import get_logger
from pagemill.messages.fleet import EngineDown, EngineStalled, EngineUp, FrontEndNews
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.liveness import Introductions
from pagemill.transport.sockets import ClientSocket, Peer, ServerSocket
from pagemill.utils.backoff import Backoff

logger = get_logger(__name__)

POLL_S = 5.0
CONNECT_S = 30.0
SUBSCRIBE = [b"subscribe"]


class EventFeed:
    """Tells every front end that asks: first the present state of each engine, then every event."""

    def __init__(self, address: str, secret: str) -> None:
        self._socket = ServerSocket(address, secret, accepts=(Role.API_SERVER,))
        self.address = self._socket.address
        self._events: SimpleQueue[FrontEndNews] = SimpleQueue()
        self._state: dict[int, EngineUp | EngineDown] = {}
        self._stalled: dict[int, EngineStalled] = {}
        self._codec: Codec[FrontEndNews] = Codec(FrontEndNews)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pagemill-feed", daemon=True)
        self._thread.start()

    def publish(self, event: FrontEndNews) -> None:
        """Tell all. From any thread, never blocks."""
        self._events.put(event)
        self._socket.wake()

    def close(self) -> None:
        """Stop."""
        self._closing = True
        self._socket.wake()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._closing:
            received = self._socket.receive(POLL_S)
            if received is not None:
                subscriber, _ = received
                for event in (*self._state.values(), *self._stalled.values()):
                    self._send(subscriber, event)
            self._send_events()

    def _send_events(self) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                return
            if isinstance(event, (EngineUp, EngineDown)):
                self._state[event.index] = event
                self._stalled.pop(event.index, None)
            elif isinstance(event, EngineStalled):
                self._stalled[event.index] = event
            for subscriber in self._socket.peers:
                self._send(subscriber, event)

    def _send(self, subscriber: Peer, event: FrontEndNews) -> None:
        try:
            self._socket.send(subscriber, self._codec.encode(event))
        except PeerGoneError:
            logger.debug("%s is gone", subscriber)


def follow(address: str, hello: Hello, listener: Callable[[FrontEndNews], None]) -> None:
    """Subscribe, and call the listener with every event on a thread of its own, for the life of the process.

    Raises HandshakeError when nobody answers.
    """
    introductions = Introductions(hello)
    socket = ClientSocket(address, introductions.next(), timeout_s=CONNECT_S)
    socket.send(SUBSCRIBE)
    codec: Codec[FrontEndNews] = Codec(FrontEndNews)

    def connect_anew(backoff: Backoff) -> ClientSocket:
        """Whoever subscribes is told the present state: what happened meanwhile is not lost."""
        while True:
            try:
                socket = ClientSocket(address, introductions.next(), timeout_s=CONNECT_S)
                socket.send(SUBSCRIBE)
                return socket
            except (HandshakeError, PeerGoneError) as error:
                logger.warning("the feed of events is not there: %s", error)
                time.sleep(backoff.next_s())

    def listen() -> None:
        nonlocal socket
        while True:
            try:
                frames = socket.receive(POLL_S)
            except PeerGoneError as error:
                logger.warning("%s; connecting again", error)
                socket.close()
                socket = connect_anew(Backoff())
                continue
            if frames is None:
                continue
            try:
                event = codec.decode(frames)
                listener(event)
            except TransportError as error:
                logger.warning("dropped a message of the feed: %s", error)
            except Exception:  # the news that follow matter more
                logger.exception("a message of the feed could not be used")

    threading.Thread(target=listen, name="pagemill-follow", daemon=True).start()
