"""`WorkerActor`: one worker as a Ray actor. Bytes in, bytes out: Ray carries the messages and understands none.

Does not know where it was placed and why, nor what a worker is made of.
"""

import os
import socket
import threading

import msgspec

from pagemill import __version__, envs
from pagemill.errors import TransportError
from pagemill.log import get_logger
from pagemill.messages.worker_api import WorkerApi
from pagemill.transport.actor_protocol import ActorHome, ActorSpec, join_frames, split_frames
from pagemill.transport.worker_protocol import Stop, WorkerPulse, command_codec, result_codec
from pagemill.worker.main import build_worker, crash_of, execute

logger = get_logger(__name__)

PULSE_S = 5.0
"""Ray tells of a process that has died; a pulse tells of one that was stopped, and a crash is told at once."""
_ALIVE = msgspec.msgpack.encode(WorkerPulse())


class WorkerActor:
    """`introduce`, then `begin`, then `execute` in the order of the calls, all on one thread; `pulse` on another.

    An error that is not the caller's to mend ends the worker: `pulse` tells it, and no command is executed any more.
    The process lives on until Ray ends it, which it does with the process that made the actor.
    """

    def __init__(self, title: str) -> None:
        # Ray calls the process by the class of the actor, between calls.
        type(self).__name__ = self._title = title
        self._worker: WorkerApi | None = None
        self._crashed = threading.Event()
        self._crash = b""
        self._commands = command_codec()
        self._results = result_codec()

    def __repr__(self) -> str:
        return self._title  # what Ray puts before the lines that this process prints

    def introduce(self) -> bytes:
        """Where this is: an ActorHome."""
        import ray  # deferred: an optional package, and there is one where this runs

        context = ray.get_runtime_context()
        home = ActorHome(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            __version__,
            [str(device) for device in context.get_accelerator_ids().get("GPU", [])],
        )
        return msgspec.msgpack.encode(home)

    def free_port(self, address: bytes) -> bytes:
        """A port that nobody uses at this address of the node, in decimal."""
        with socket.create_server((address.decode(), 0)) as listener:
            return str(listener.getsockname()[1]).encode()

    def begin(self, spec: bytes) -> None:
        """Make the worker that an ActorSpec describes."""
        try:
            wanted = msgspec.msgpack.decode(spec, type=ActorSpec)
            if wanted.devices:
                envs.show_cuda_devices(wanted.devices)
            self._worker = build_worker(wanted.worker, wanted.config, wanted.rank)
            self._rank = wanted.rank
        except Exception as error:
            self._end(error)

    def execute(self, message: bytes) -> bytes:
        """Execute a command; the answer as bytes, none where there is no answer."""
        worker = self._worker
        if worker is None:
            return b""
        try:
            command = self._commands.decode(split_frames(message))
        except TransportError as error:
            logger.error("dropped a command: %s", error)
            return b""
        try:
            if isinstance(command, Stop):
                self._worker = None
                worker.shutdown()
                return b""
            result = execute(worker, self._rank, command)
            return b"" if result is None else join_frames(self._results.encode(result))
        except Exception as error:
            self._end(error)
            return b""

    def pulse(self) -> bytes:
        """After `PULSE_S`, or as soon as the worker has crashed: a WorkerReport."""
        return self._crash if self._crashed.wait(PULSE_S) else _ALIVE

    def _end(self, error: Exception) -> None:
        self._worker = None
        self._crash = crash_of(error)
        self._crashed.set()
