"""`Deployment`: the engine cores of one model, in processes of their own, and what front ends need to reach them.

Does not know who the front ends are, nor what a core does.
"""

import threading
from collections.abc import Callable

import msgspec

from pagemill.config.engine_config import EngineConfig
from pagemill.engine.process import CoreBirth
from pagemill.log import get_logger
from pagemill.messages.fleet import EngineDown, EngineUp, FleetEvent
from pagemill.supervisor import EngineSupervisor, Patience
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.handshake import new_secret

logger = get_logger(__name__)

Listener = Callable[[FleetEvent], None]


class Deployment:
    """Starts engines, restarts them, and tells listeners; a context manager that stops all of them."""

    def __init__(
        self,
        config: EngineConfig,
        worker: str,
        num_engines: int,
        patience: Patience,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`worker` is "module:callable", called with the configuration in each core's process. `on_lost` is called
        when the last engine is gone for good, on the thread of its supervisor."""
        self.secret = new_secret()
        """What lets a process connect to the sockets of this deployment."""
        self.folder = PrivateDirectory()
        """Where the sockets are."""
        self._config = config
        self._worker = worker
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._state: dict[int, EngineUp | EngineDown] = {}
        self._supervisors = [
            EngineSupervisor(index, self._payload_of(index), self._publish, patience) for index in range(num_engines)
        ]

    def start(self) -> None:
        """Start all engines; does not wait."""
        for supervisor in self._supervisors:
            supervisor.start()

    def wait_ready(self) -> list[EngineUp]:
        """Wait for all engines. Raises what kept the first of them from starting: ConfigError, ModelError,
        EngineDeadError."""
        return [supervisor.first_up() for supervisor in self._supervisors]

    def subscribe(self, listener: Listener) -> None:
        """Tell a listener the present state of every engine, then every event. It is called on threads of the
        supervisors and must not block."""
        with self._lock:
            for event in self._state.values():
                listener(event)
            self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Tell it nothing any more."""
        with self._lock:
            self._listeners.remove(listener)

    def addresses(self) -> dict[int, str]:
        """Engines that are up, and where."""
        with self._lock:
            return {index: event.address for index, event in self._state.items() if isinstance(event, EngineUp)}

    @property
    def lost(self) -> bool:
        """Whether all engines are gone for good."""
        with self._lock:
            finals = [event for event in self._state.values() if isinstance(event, EngineDown) and event.final]
        return len(finals) == len(self._supervisors)

    def pids(self) -> list[int | None]:
        """The processes of the engines, by index."""
        return [supervisor.pid for supervisor in self._supervisors]

    def stop(self) -> None:
        """End everything. A second call does nothing."""
        try:
            for supervisor in self._supervisors:
                supervisor.ask_to_stop()
            for supervisor in self._supervisors:
                supervisor.stop()
        finally:
            self.folder.remove()

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _payload_of(self, index: int) -> Callable[[int], bytes]:
        def payload(incarnation: int) -> bytes:
            # A core that was killed leaves its socket behind.
            (self.folder.path / f"core-{index}-{incarnation - 1}").unlink(missing_ok=True)
            address = self.folder.ipc(f"core-{index}-{incarnation}")
            return msgspec.msgpack.encode(CoreBirth(self._config, index, self._worker, address, self.secret))

        return payload

    def _publish(self, event: FleetEvent) -> None:
        with self._lock:
            if isinstance(event, (EngineUp, EngineDown)):
                self._state[event.index] = event
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:  # its own affair: the others, and the engine, go on
                    logger.exception("a listener failed on %s", type(event).__name__)
        if isinstance(event, EngineDown) and event.final and self.lost:
            logger.error("no engine is left, and none can be started again: the server ends")
            self._on_lost()
