"""`KVEventPublisher`: KV cache events on a ZMQ PUB socket, and a ROUTER socket that sends missed batches again.

Knows nothing about what the events mean. Subscribers are not of this deployment: nothing that they send is trusted,
and nothing but requests for replay is read. The frames are a public format (docs/kv-cache.md).
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from pagemill.config.event_endpoints import Endpoint, publish_endpoint, replay_endpoint
from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.errors import ConfigError
from pagemill.log import get_logger
from pagemill.messages.kv_events import KVEvent, KVEventBatch
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.curve import HANDSHAKE_MS
from pagemill.transport.kv_event_gate import gate_maker
from pagemill.transport.subscriber_relay import SubscriberRelay
from pagemill.utils.wake_pipe import WakePipe

logger = get_logger(__name__)

SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
"""In place of a sequence number, before an empty payload: minus one."""
MAX_FRAME_BYTES = 1024
"""Of what subscribers say: a topic, the number of a batch, or, over CURVE, the proof of a key."""
MAX_SUBSCRIPTIONS = 1000
"""Different topics that all subscribers together may name. The library keeps 50 bytes for each byte of them, and nobody
else counts: beyond this, all are hung up, connect again, and ask for what they missed."""
REOPEN_S = 10.0
REOPEN_PAUSE_S = 0.02
"""A port is free a moment after its socket was closed; after the former, it is said that it is not."""
LINGER_MS = 500
"""How long `shutdown` tries to deliver what was published."""
WARN_EVERY_S = 60.0


class KVEventPublisher:
    """Publishes batches in order, numbered from 0, on a thread of its own.

    `publish` is called by one thread, and never blocks. A batch that finds the queue full is dropped; its number is
    used up, so that subscribers see the gap. Raises ConfigError when an endpoint cannot be bound.
    """

    def __init__(self, config: KVEventsConfig, data_parallel_rank: int = 0) -> None:
        self.num_dropped = 0
        """Batches that were not published."""
        self._config = config
        self._rank = data_parallel_rank
        self._topic = config.topic.encode("utf-8", "replace")
        self._next_sequence = 0
        self._queue: deque[tuple[int, KVEventBatch]] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._warned_at = -WARN_EVERY_S
        self._stopping = False
        published = publish_endpoint(config, data_parallel_rank=data_parallel_rank)
        replayed = replay_endpoint(config, data_parallel_rank=data_parallel_rank)
        self._published = published
        self._num_subscriptions = 0
        make_gate = gate_maker(config)
        # A context of its own: its end is the moment at which the ports are free again.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = make_gate(self._context)
        self._relays: dict[str, SubscriberRelay] = {}
        """By endpoint, where strangers may connect."""
        self._folder: PrivateDirectory | None = None
        self._num_inner = 0
        try:
            self._pub = self._open("endpoint", published, zmq.XPUB, config.hwm)
            self._router: zmq.Socket[bytes] | None = None
            if replayed is not None:
                self._router = self._open("replay_endpoint", replayed, zmq.ROUTER, config.buffer_steps + 1)
            self._wakeup = WakePipe()
        except BaseException:
            self._close(linger_ms=0)
            raise
        self._thread = threading.Thread(target=self._run, name="pagemill-kv-events", daemon=True)
        self._thread.start()
        replay = f", replay on {replayed.address}" if replayed else ", no replay"
        logger.info("KV cache events on %s%s", published.address, replay)
        if not self._gate.closed_to_others and (published.every_network or (replayed and replayed.every_network)):
            logger.warning("KV cache events carry the tokens of prompts, and every network can read them")

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue a batch; the events must not change any more. Nothing happens after `shutdown`."""
        if self._stopping:
            return
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        if len(self._queue) >= self._config.max_queue_size:
            self._drop("the queue is full: they are produced faster than they are sent")
            return
        self._queue.append((sequence, KVEventBatch(time.time(), events, self._rank)))
        self._wakeup.wake()

    def shutdown(self) -> None:
        """Publish what is queued, and close the ports: they are free when this returns. May be called twice."""
        if self._stopping:
            return
        self._stopping = True
        self._wakeup.wake()
        self._thread.join()
        self._close(LINGER_MS)
        self._wakeup.close()

    def _close(self, linger_ms: int) -> None:
        self._gate.close()
        self._context.destroy(linger_ms)
        for relay in self._relays.values():
            relay.close(linger_ms / 1000)
        if self._folder is not None:
            self._folder.remove()

    def _address_of(self, endpoint: Endpoint) -> str:
        """Where the library listens or connects: behind a relay, where everybody can connect. Raises OSError."""
        if self._gate.closed_to_others or not endpoint.binds or not endpoint.address.startswith("tcp://"):
            return endpoint.address
        self._folder = self._folder or PrivateDirectory()
        host, _, port = endpoint.address.removeprefix("tcp://").rpartition(":")
        # Another one each time: the library removes the file of a closed socket some time later.
        self._num_inner += 1
        inner = self._folder.ipc(f"{self._num_inner}")
        path = inner.removeprefix("ipc://")
        relay = self._relays.get(endpoint.address)
        if relay is None:
            host = "0.0.0.0" if host == "*" else host.strip("[]")
            self._relays[endpoint.address] = SubscriberRelay(host, int(port), path)
        else:
            relay.inner = path
        return inner

    def _open(self, name: str, endpoint: Endpoint, kind: int, high_water_mark: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, high_water_mark)
        socket.set(zmq.IPV6, int("[" in endpoint.address))
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._gate.guard(socket)
        if kind == zmq.ROUTER:
            # A replay that a subscriber does not read is given up, rather than sent with holes.
            socket.set(zmq.ROUTER_MANDATORY, 1)
        try:
            address = self._address_of(endpoint)
            if endpoint.binds:
                socket.bind(address)
            else:
                socket.connect(address)
        except (OSError, zmq.ZMQError) as error:
            socket.close(0)
            raise ConfigError(
                f"kv_events_config: {name}={endpoint.address!r} cannot be used: {error.strerror}"
            ) from error
        return socket

    def _drop(self, why: str) -> None:
        self.num_dropped += 1
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            logger.warning("batches of KV cache events are dropped, %d so far: %s", self.num_dropped, why)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            poller = zmq.Poller()
            for end in (self._wakeup.fd, self._pub, self._router):
                if end is not None:
                    poller.register(end, zmq.POLLIN)
            ready: dict[Any, int] = dict(poller.poll())
            if self._wakeup.fd in ready:
                self._wakeup.drain()
            stopping = self._stopping
            # First, so that a replay has all that was published before it was asked for.
            self._send_queued()
            if stopping:
                return
            if self._pub in ready:
                self._count_subscriptions()
                if self._pub.closed:  # stopped before the port could be had again
                    return
            if self._router is not None and self._router in ready:
                self._answer(self._router)

    def _count_subscriptions(self) -> None:
        """Read what subscribers have to say, which is what they want to hear."""
        with contextlib.suppress(zmq.Again):
            while self._num_subscriptions <= MAX_SUBSCRIPTIONS:
                message = self._pub.recv(zmq.NOBLOCK)
                self._num_subscriptions += {b"\1": 1, b"\0": -1}.get(message[:1], 0)
        if self._num_subscriptions > MAX_SUBSCRIPTIONS:
            logger.warning("subscribers to KV cache events name more than %d topics: all hung up", MAX_SUBSCRIPTIONS)
            self._hang_up_all()

    def _hang_up_all(self) -> None:
        """A new socket in place of the old one, which is forgotten with all that it was told. While another process has
        the port, batches wait, and are dropped when they are too many."""
        self._pub.close(0)
        self._num_subscriptions = 0
        warn_at = time.monotonic() + REOPEN_S
        while not self._stopping:
            try:
                self._pub = self._open("endpoint", self._published, zmq.XPUB, self._config.hwm)
                return
            except (ConfigError, zmq.ZMQError) as error:
                if time.monotonic() > warn_at:
                    logger.error("KV cache events are not published: %s; trying again", error)
                    warn_at += WARN_EVERY_S
                time.sleep(REOPEN_PAUSE_S)

    def _send_queued(self) -> None:
        # What is queued meanwhile waits for the next round, so that requests for replay get their turn.
        for _ in range(len(self._queue)):
            sequence, batch = self._queue.popleft()
            try:
                payload = self._encoder.encode(batch)
                self._pub.send_multipart([self._topic, _sequence_bytes(sequence), payload])
            except Exception as error:  # one batch is lost; the thread, and all later ones, must not be
                self._drop(f"{type(error).__name__}: {error}")
                continue
            if self._router is not None:
                self._sent.append((sequence, payload))

    def _answer(self, router: "zmq.Socket[bytes]") -> None:
        """Send one subscriber what it asks for: [identity, empty, first sequence number] -> batches, end marker."""
        try:
            frames = router.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        *envelope, first = frames
        if envelope[1:] not in ([], [b""]) or len(first) != SEQUENCE_BYTES:
            logger.debug("not a request for replay: frames of %s bytes", [len(frame) for frame in frames])
            return
        start = int.from_bytes(first, "big")
        try:
            for sequence, payload in self._sent:
                if sequence >= start:
                    reply = [*envelope, self._topic, _sequence_bytes(sequence), payload]
                    router.send_multipart(reply, zmq.NOBLOCK)
            router.send_multipart([*envelope, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("a replay from %d was given up: %s", start, error)


def _sequence_bytes(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
