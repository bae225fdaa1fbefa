"""`EngineFleet`: the engine cores of one model, in processes of their own, and what front ends need to reach them.

Does not know who the front ends are, nor what a core does. Engines of other machines are its too, on the head.
"""

import hashlib
import json
import threading
from collections.abc import Callable

import msgspec

from pagemill import __version__
from pagemill.config.engine_config import EngineConfig
from pagemill.config.fleet_plan import FleetPlan
from pagemill.engine.process import CoreSpec
from pagemill.errors import EngineDeadError
from pagemill.fleet.dp_coordinator import WaveCoordinator
from pagemill.fleet.expert_rendezvous import ExpertRendezvous
from pagemill.fleet.head import NodeRegistry, name_ranks
from pagemill.fleet.supervisor import EngineSupervisor, LivenessTimeouts
from pagemill.log import get_logger
from pagemill.messages.fleet import EngineDown, EngineUp, FleetEvent
from pagemill.transport.addresses import PrivateDirectory, ip_of, own_address_towards, tcp_address
from pagemill.transport.handshake import new_secret

logger = get_logger(__name__)

Listener = Callable[[FleetEvent], None]


class EngineFleet:
    """Starts engines, restarts them, and tells listeners; a context manager that stops all of them."""

    def __init__(
        self,
        config: EngineConfig,
        worker: str,
        plan: FleetPlan,
        timeouts: LivenessTimeouts,
        *,
        secret: str | None = None,
        node_timeout_s: float = 10.0,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`worker` is "module:callable", called with the configuration in each core's process. `secret` is what the
        machines share, when there are several. `on_lost` is called when the last engine is gone for good, on the
        thread of its supervisor. Raises ConfigError when the address of the head cannot be bound."""
        self.secret = secret or new_secret()
        """What lets a process connect to the sockets of this deployment."""
        self.folder = PrivateDirectory()
        """Where the sockets are."""
        self._config = config
        self._worker = worker
        self._on_lost = on_lost
        self._plan = plan
        self._meetings = ExpertRendezvous(plan.size, str(self.folder.path)) if plan.shares_experts else None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._listeners: list[Listener] = []
        self._state: dict[int, EngineUp | EngineDown] = {}
        self._supervisors = [
            EngineSupervisor(index, self._payload_of(index), self._publish, timeouts) for index in plan.local
        ]
        self._desk = self._open_desk(node_timeout_s)
        self._coordinator = self._make_coordinator()

    def start(self) -> None:
        """Start this machine's engines; does not wait."""
        for supervisor in self._supervisors:
            supervisor.start()

    def wait_ready(self) -> list[EngineUp]:
        """Wait for all engines, those of other machines too: one event each. Raises what kept the first of this
        machine's from starting: ConfigError, ModelError, EngineDeadError."""
        for supervisor in self._supervisors:
            supervisor.first_up()
        awaited = [*self._plan.local, *self._plan.remote]
        with self._changed:
            if not self._ups().keys() >= set(self._plan.remote):
                logger.info("waiting for engines %s, of other machines", name_ranks(self._plan.remote))
            while len(self._ups()) < len(awaited):
                lost = next(
                    (event for event in self._state.values() if isinstance(event, EngineDown) and event.final), None
                )
                if lost is not None:  # it was up, and is gone for good before all were
                    raise EngineDeadError(f"engine core {lost.index} is gone: {lost.reason}")
                self._changed.wait()
            return [self._ups()[index] for index in awaited]

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
            return {index: event.address for index, event in self._ups().items()}

    @property
    def lost(self) -> bool:
        """Whether all engines are gone for good; of those of this machine, where it is not the head."""
        with self._lock:
            finals = [event for event in self._state.values() if isinstance(event, EngineDown) and event.final]
        return len(finals) == (len(self._plan.local) if self._plan.headless else self._plan.size)

    def pids(self) -> list[int | None]:
        """The processes of this machine's engines, by index."""
        return [supervisor.pid for supervisor in self._supervisors]

    def stop(self) -> None:
        """End everything. A second call does nothing."""
        try:
            for supervisor in self._supervisors:
                supervisor.ask_to_stop()
            if self._desk is not None:
                self._desk.close()
            for supervisor in self._supervisors:
                supervisor.stop()
            if self._coordinator is not None:
                self._coordinator.close()
        finally:
            self.folder.remove()

    def __enter__(self) -> "EngineFleet":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _payload_of(self, index: int) -> Callable[[int], bytes]:
        def payload(incarnation: int) -> bytes:
            # A core that was killed leaves its socket behind.
            (self.folder.path / f"core-{index}-{incarnation - 1}").unlink(missing_ok=True)
            address = self._address_of(f"core-{index}-{incarnation}")
            meeting = None if self._meetings is None else self._meetings.join(index, incarnation)
            config = self._config.of_engine(index - self._plan.local.start)
            birth = CoreSpec(config, index, self._worker, address, self.secret, self._plan.lockstep, meeting)
            return msgspec.msgpack.encode(birth)

        return payload

    def _address_of(self, name: str) -> str:
        """Where a core shall listen: a file, or, for a head on another machine, a port that is free."""
        if self._plan.headless and self._plan.head is not None:
            return tcp_address(own_address_towards(self._plan.head[0]))
        return self.folder.ipc(name)

    def _open_desk(self, timeout_s: float) -> NodeRegistry | None:
        plan = self._plan
        if plan.head is None or not plan.remote:
            return None
        address, settings = tcp_address(ip_of(plan.head[0]), plan.head[1]), shared_settings(self._config)
        try:
            return NodeRegistry(address, self.secret, plan.remote, plan.size, settings, self._publish, timeout_s)
        except BaseException:
            self.folder.remove()
            raise

    def _make_coordinator(self) -> WaveCoordinator | None:
        if not self._plan.lockstep or self._plan.headless:
            return None
        coordinator = WaveCoordinator(self.secret)
        self._listeners.append(coordinator.notify)
        return coordinator

    def _ups(self) -> dict[int, EngineUp]:
        return {index: event for index, event in self._state.items() if isinstance(event, EngineUp)}

    def _end_meeting(self, event: EngineDown, meetings: ExpertRendezvous) -> EngineDown:
        """Replace the engines that met the one that is gone; what is to be said of it."""
        others = meetings.leave(event.index, event.incarnation)
        for index, incarnation in others or ():
            self._supervisors[index].replace(incarnation, f"engine core {event.index} is gone, with its experts")
        return msgspec.structs.replace(event, follows=others is None)

    def _publish(self, event: FleetEvent) -> None:
        if isinstance(event, EngineDown) and self._meetings is not None:
            event = self._end_meeting(event, self._meetings)
        with self._changed:
            if isinstance(event, (EngineUp, EngineDown)):
                self._state[event.index] = event
                self._changed.notify_all()
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:  # its own affair: the others, and the engine, go on
                    logger.exception("a listener failed on %s", type(event).__name__)
        if isinstance(event, EngineDown) and event.final and self.lost:
            logger.error("no engine is left, and none can be started again: the server ends")
            self._on_lost()


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """What must be the same on all machines of one server, by name: requests are checked once, and may go on elsewhere
    when an engine dies. The model is told by what its config.json says, as folders may have other names."""
    facts, model = config.facts, config.model
    described = json.dumps([facts.hf_config, facts.vocab_size, facts.eos_token_ids], sort_keys=True, default=str)
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    return {
        "the version of pagemill": __version__,
        "the model": f"{facts.architecture} with configuration {digest}",
        "dtype": model.dtype,
        "max_model_len": str(model.max_model_len),
        "load_format": model.load_format,
        "seed": str(model.seed),
    }
