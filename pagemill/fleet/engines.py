"""`EngineFleet`: the engine cores of one server, in processes of their own, and what API servers need to reach them.

Does not know who the API servers are, nor what a core does. On the head it publishes the engines of other machines too.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class FleetSpec:
    """The engines of a server: what each runs, where, and how they belong together."""

    config: EngineConfig
    worker: str
    """"module:callable", called with the configuration in each core's process."""
    plan: FleetPlan
    timeouts: LivenessTimeouts = field(default_factory=LivenessTimeouts)
    secret: str | None = None
    """What lets a process connect to the sockets of this server, the same on all its machines; None: drawn at random,
    for one machine."""
    node_timeout_s: float = 10.0
    """Seconds of silence after which head and node take each other for gone."""

    @property
    def needs_coordinator(self) -> bool:
        """Whether this machine coordinates the waves of all engines."""
        return self.plan.lockstep and not self.plan.headless


class EngineFleet:
    """Starts engines, restarts them, and publishes events about them; a context manager that stops all of them."""

    def __init__(self, spec: FleetSpec, *, on_lost: Callable[[], None] = lambda: None) -> None:
        """`on_lost` is called when the last engine is gone for good, on the thread of its supervisor. Raises
        ConfigError when the address of the head cannot be bound."""
        self.secret = spec.secret or new_secret()
        """What lets a process connect to the sockets of the engines."""
        self.folder = PrivateDirectory()
        """Where the sockets are."""
        self._spec = spec
        self._plan = spec.plan
        self._on_lost = on_lost
        self._rendezvous = ExpertRendezvous(spec.plan.size, str(self.folder.path)) if spec.plan.shares_experts else None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._listeners: list[Listener] = []
        self._state: dict[int, EngineUp | EngineDown] = {}
        self._supervisors = [self._supervisor_of(index) for index in spec.plan.local]
        self._nodes = self._make_node_registry()
        self._coordinator = self._make_coordinator()

    def start(self) -> None:
        """Start this machine's engines; does not wait."""
        for supervisor in self._supervisors:
            supervisor.start()

    def wait_ready(self) -> list[EngineUp]:
        """Wait for all engines, including those of other machines: one event each. Raises what kept the first of this
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
        """Call a listener with the present state of every engine, then with every event. It is called on threads of the
        supervisors and must not block."""
        with self._lock:
            for event in self._state.values():
                listener(event)
            self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling a listener."""
        with self._lock:
            self._listeners.remove(listener)

    def addresses(self) -> dict[int, str]:
        """The addresses of the engines that are up, by index."""
        with self._lock:
            return {index: event.address for index, event in self._ups().items()}

    @property
    def lost(self) -> bool:
        """Whether all engines are gone for good; on a headless node, all of this machine's."""
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
            if self._nodes is not None:
                self._nodes.close()
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

    def _supervisor_of(self, index: int) -> EngineSupervisor:
        def payload(incarnation: int) -> bytes:
            self._remove_socket_of(index, incarnation - 1)
            return msgspec.msgpack.encode(self._core_spec(index, incarnation))

        return EngineSupervisor(index, payload, self._publish, self._spec.timeouts)

    def _core_spec(self, index: int, incarnation: int) -> CoreSpec:
        """What the process of an engine is given. Registers this incarnation at the rendezvous, where there is one."""
        return CoreSpec(
            config=self._spec.config.of_engine(index - self._plan.local.start),
            index=index,
            worker=self._spec.worker,
            address=self._address_of(_socket_name(index, incarnation)),
            secret=self.secret,
            lockstep=self._plan.lockstep,
            replicas=None if self._rendezvous is None else self._rendezvous.join(index, incarnation),
        )

    def _address_of(self, name: str) -> str:
        """Where a core listens: a file of this name, or, for a head on another machine, a free port."""
        if self._plan.headless and self._plan.head is not None:
            return tcp_address(own_address_towards(self._plan.head[0]))
        return self.folder.ipc(name)

    def _remove_socket_of(self, index: int, incarnation: int) -> None:
        """A core that was killed has left its socket behind."""
        (self.folder.path / _socket_name(index, incarnation)).unlink(missing_ok=True)

    def _make_node_registry(self) -> NodeRegistry | None:
        plan = self._plan
        if plan.head is None or not plan.remote:
            return None
        address = tcp_address(ip_of(plan.head[0]), plan.head[1])
        settings = shared_settings(self._spec.config)
        timeout_s = self._spec.node_timeout_s
        try:
            return NodeRegistry(address, self.secret, plan.remote, plan.size, settings, self._publish, timeout_s)
        except BaseException:
            self.folder.remove()
            raise

    def _make_coordinator(self) -> WaveCoordinator | None:
        if not self._spec.needs_coordinator:
            return None
        coordinator = WaveCoordinator(self.secret)
        self._listeners.append(coordinator.notify)
        return coordinator

    def _ups(self) -> dict[int, EngineUp]:
        return {index: event for index, event in self._state.items() if isinstance(event, EngineUp)}

    def _end_group(self, event: EngineDown, rendezvous: ExpertRendezvous) -> EngineDown:
        """Replace the engines that were connected to the one that is gone. Returns the event to publish, which says
        whether this end followed from another's."""
        others = rendezvous.leave(event.index, event.incarnation)
        for index, incarnation in others or ():
            self._supervisors[index].replace(incarnation, f"engine core {event.index} is gone, with its experts")
        return msgspec.structs.replace(event, follows=others is None)

    def _publish(self, event: FleetEvent) -> None:
        if isinstance(event, EngineDown) and self._rendezvous is not None:
            event = self._end_group(event, self._rendezvous)
        with self._changed:
            if isinstance(event, (EngineUp, EngineDown)):
                self._state[event.index] = event
                self._changed.notify_all()
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:  # the other listeners, and the engine, must not suffer from it
                    logger.exception("a listener failed on %s", type(event).__name__)
        if isinstance(event, EngineDown) and event.final and self.lost:
            logger.error("no engine is left, and none can be started again: the server ends")
            self._on_lost()


def _socket_name(index: int, incarnation: int) -> str:
    return f"core-{index}-{incarnation}"


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """The settings that must be the same on all machines of one server, by name: requests are checked once, and may
    continue on another engine when one dies. The model is identified by its config.json, as folders may have other
    names."""
    facts = config.facts
    model = config.model
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
