"""`RayWorkers`: the actors of one executor: placed on a cluster, started, watched, ended.

Knows nothing about what is said to them.
"""

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pagemill import __version__, envs
from pagemill.catalog.registry import load_path
from pagemill.engine.executor.placement import bundle_of_ranks, bundle_plans, local_ranks
from pagemill.engine.executor.ray_cluster import RayCluster, Room
from pagemill.engine.executor.worker_health import WorkerHealth
from pagemill.errors import ConfigError, DistributedError, EngineDeadError, PagemillError, start_error
from pagemill.log import get_logger
from pagemill.messages.worker_rank import WorkerRank
from pagemill.transport.actor_protocol import ActorHome, ActorSpec
from pagemill.transport.worker_protocol import WorkerCrashed, WorkerReport
from pagemill.utils.awake_clock import AwakeClock

logger = get_logger(__name__)

ACTOR = "pagemill.worker.ray_actor:WorkerActor"
PULSES = "pulses"
SILENT_S = 30.0
"""Without a pulse for so long, an actor counts as stopped. Pulses come every five seconds, also while it computes."""
START_S = 300.0
"""For processes to start on nodes that may have to unpack an environment first."""
HEALTH_POLL_S = 0.2
"""While an answer is awaited, the health of the workers is checked this often."""
WATCH_S = 5.0
MAX_GAP_S = 8.0
"""Between two looks at the clock, which the watcher takes at least every `WATCH_S`. A longer gap tells that this
process itself did not run."""
DEATH_REPORT_GRACE_S = 2.0
"""How long an answer may be missing before the reason is known."""
SECONDARY_DEATH_GRACE_S = 0.3
"""A worker that lost another one may say so before that one's death is reported, which is the better reason."""
MAX_CAUSE_CHARS = 400
INLINE_BYTES = 64 * 1024
"""Larger messages go into Ray's object store once, instead of to each actor by itself."""
_REPORTS = msgspec.msgpack.Decoder(WorkerReport)


class RayWorkers:
    """The workers of one replica, by rank: tensor x pipeline parallel ones, `sizes`, which get `per_worker` (Ray's
    resources, such as CPU and GPU) each.

    `on_death` is called once, from a watching thread, when the first of them dies. Raises ConfigError for sizes that
    cannot be, for a cluster that has no room within `room_s` seconds, and for one with another version of pagemill.
    """

    def __init__(
        self,
        worker: str,
        config: bytes,
        sizes: tuple[int, int],
        per_worker: Mapping[str, float],
        *,
        room_s: float,
        first_index: int = 0,
        on_death: Callable[[EngineDeadError], None] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        if min(sizes) < 1:
            raise ConfigError(f"tensor and pipeline parallel sizes {sizes} are not allowed: at least 1 each")
        self._health = WorkerHealth(self._silences, silent_s, on_death)
        self._watcher: threading.Thread | None = None
        self._actors: list[Any] = []
        self._homes: list[ActorHome] = []
        self._first_index = first_index
        self._room: Room | None = None
        world_size = sizes[0] * sizes[1]
        self._cluster = RayCluster(int(per_worker.get("CPU", 0) * world_size))
        self._ray = self._cluster.ray
        try:
            self._room = self._cluster.reserve(bundle_plans(*sizes, per_worker), room_s)
            self._start(self._room, per_worker)
            self._begin(worker, config, sizes)
            self._name_calls()
        except BaseException:
            self.stop(None, 0.0)
            raise
        self._clock = AwakeClock(MAX_GAP_S)
        self._last_pulse = [self._clock.now()] * world_size
        self._watcher = threading.Thread(target=self._watch, name="pagemill-watch-ray", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank, each on its node."""
        return [home.pid for home in self._homes]

    @property
    def homes(self) -> list[ActorHome]:
        """Where the workers are, by rank."""
        return self._homes

    def ask(self, rank: int, message: Any) -> Any:
        """Send a message that is answered; what `answer` takes. Workers execute messages in the order of the calls."""
        return self._execute[rank].remote(message)

    def tell(self, rank: int, message: Any) -> None:
        """Send a message whose answer nobody wants."""
        self._tell[rank].remote(message)

    def parcel(self, message: bytes) -> Any:
        """What to give to `ask` and `tell` for a message to several workers."""
        return message if len(message) <= INLINE_BYTES else self._ray.put(message)

    def answer(self, rank: int, reference: Any, timeout_s: float) -> bytes | None:
        """The answer to what was asked; None when it did not come in time. Raises EngineDeadError."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._fetch(rank, reference, max(0.0, min(deadline - time.monotonic(), HEALTH_POLL_S)))
            except self._ray.exceptions.GetTimeoutError:
                self.check()
                if time.monotonic() >= deadline:
                    return None

    def answers(self, awaited: dict[Any, int], timeout_s: float) -> list[tuple[int, bytes]]:
        """What has come of the answers `awaited` (reference -> rank), with the rank: taken out of it. At least one,
        unless there is none within `timeout_s` or a fraction of a second. Raises EngineDeadError."""
        ready, _ = self._ray.wait(list(awaited), timeout=max(0.0, min(timeout_s, HEALTH_POLL_S)))
        if not ready:
            self.check()
        ranks = [(awaited.pop(reference), reference) for reference in ready]
        return [(rank, self._fetch(rank, reference)) for rank, reference in ranks]

    def check(self) -> None:
        """Raise EngineDeadError (at start ConfigError or ModelError, where that is the cause) when a worker is gone,
        and EngineDeadError when one gives no pulse. From any thread."""
        self._health.check()

    def die(self, reason: str) -> PagemillError:
        """Declare the workers dead. The first reason given is the one that counts; returns it, as an exception."""
        return self._health.die(reason)

    def stop(self, request: bytes | None, grace_s: float) -> None:
        """End all actors: `request` is sent first, and what lives after `grace_s` is killed. A second call does
        nothing."""
        if not self._health.begin_stop():
            return
        ray = self._ray
        try:
            if not ray.is_initialized():  # somebody has closed the connection, and Ray has ended the actors
                return
            if request is not None and not self._health.is_dead:
                asked = [self.ask(rank, request) for rank in range(len(self._actors))]
                ray.wait(asked, num_returns=len(asked), timeout=grace_s)
            for actor in self._actors:
                ray.kill(actor)
            if self._watcher is not None and self._watcher is not threading.current_thread():
                self._watcher.join(DEATH_REPORT_GRACE_S)
            if self._room is not None:
                self._cluster.give_back(self._room)
        except ray.exceptions.RayError as error:
            logger.warning("the Ray cluster cannot be told that the workers are not needed any more: %s", error)
        finally:
            self._cluster.close()

    def _start(self, room: Room, per_worker: Mapping[str, float]) -> None:
        """One actor per rank, in its place; and where that is."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # deferred: an optional package

        make = self._ray.remote(concurrency_groups={PULSES: 1})(load_path("actor", ACTOR))
        rest = {name: amount for name, amount in per_worker.items() if name not in ("CPU", "GPU")}
        num_cpus = per_worker.get("CPU", 0)
        namespace = f"pagemill-{uuid.uuid4().hex}"
        environment = {
            "OMP_NUM_THREADS": f"{max(1, int(num_cpus))}",
            "PAGEMILL_LOGGING_LEVEL": envs.log_level(),
            "PAGEMILL_NATIVE_KERNELS": "1" if envs.native_kernels() else "0",
        }
        for rank, bundle in enumerate(bundle_of_ranks(room.nodes, room.plan.ranks_per_bundle)):
            placed = make.options(
                name=self._title(rank),
                namespace=namespace,
                num_cpus=num_cpus,
                num_gpus=per_worker.get("GPU", 0),
                resources=rest,
                scheduling_strategy=PlacementGroupSchedulingStrategy(room.group, bundle),
                runtime_env={"env_vars": environment},
                max_restarts=0,
            )
            self._actors.append(placed.remote(self._title(rank)))
        introduced = self._started([actor.introduce.remote() for actor in self._actors])
        self._homes = [msgspec.msgpack.decode(home, type=ActorHome) for home in introduced]
        for rank, home in enumerate(self._homes):
            logger.debug("%s is process %d on %s", self._title(rank), home.pid, home.address)
            if home.version != __version__:
                raise ConfigError(f"{home.address} has pagemill {home.version}; {__version__} is needed, as here")

    def _begin(self, worker: str, config: bytes, sizes: tuple[int, int]) -> None:
        """Tell each actor who it is."""
        homes = self._homes
        init_address = ""
        nodes = [home.node_id for home in homes]
        if len(homes) > 1:
            (port,) = self._started([self._actors[0].free_port.remote(homes[0].address.encode())])
            host = f"[{homes[0].address}]" if ":" in homes[0].address else homes[0].address
            init_address = f"tcp://{host}:{port.decode()}"
        for rank, (actor, home, local_rank) in enumerate(zip(self._actors, homes, local_ranks(nodes), strict=True)):
            spec = ActorSpec(
                worker=worker,
                config=config,
                rank=WorkerRank(
                    rank=rank,
                    local_rank=local_rank,
                    world_size=len(homes),
                    tensor_parallel_size=sizes[0],
                    pipeline_parallel_size=sizes[1],
                    init_address=init_address,
                ),
                devices=[device for other in homes if other.node_id == home.node_id for device in other.devices],
            )
            actor.begin.options(num_returns=0).remote(msgspec.msgpack.encode(spec))

    def _name_calls(self) -> None:
        """A process is called by the name of the call that it works on, and by the actor's in between."""
        called = [(actor, self._title(rank)) for rank, actor in enumerate(self._actors)]
        self._execute = [actor.execute.options(name=title) for actor, title in called]
        self._tell = [actor.execute.options(name=title, num_returns=0) for actor, title in called]
        self._pulse = [actor.pulse.options(name=title, concurrency_group=PULSES) for actor, title in called]

    def _started(self, references: list[Any]) -> list[bytes]:
        """What the actors say while they start. Raises EngineDeadError."""
        try:
            return [bytes(answer) for answer in self._ray.get(references, timeout=START_S)]
        except self._ray.exceptions.RayError as error:  # a timeout is one of them
            raise EngineDeadError(f"a worker cannot start on the Ray cluster: {error}") from error

    def _fetch(self, rank: int, reference: Any, timeout_s: float | None = None) -> bytes:
        try:
            answer = bytes(self._ray.get(reference, timeout=timeout_s))
        except self._ray.exceptions.GetTimeoutError:
            raise
        except self._ray.exceptions.RayError as error:
            raise self.die(self._gone(rank, error)) from error
        if not answer:  # it has crashed, and its pulse says why
            self._health.wait_for_death(DEATH_REPORT_GRACE_S)
            raise self.die(f"{self._who(rank)} gave no answer")
        return answer

    def _watch(self) -> None:
        """Until the first is gone: note the pulses, and why it ends. There is always one on its way from each."""
        awaited = {pulse.remote(): rank for rank, pulse in enumerate(self._pulse)}
        secondary = ""
        until = math.inf
        while awaited and time.monotonic() < until and not (self._health.is_stopping or self._health.is_dead):
            self._clock.now()  # so that it runs also when nothing comes
            wait_s = max(0.0, min(WATCH_S, until - time.monotonic()))
            for reference in self._ray.wait(list(awaited), timeout=wait_s)[0]:
                rank = awaited.pop(reference)
                try:
                    report = _REPORTS.decode(bytes(self._ray.get(reference)))
                except self._ray.exceptions.RayError as error:
                    self.die(self._gone(rank, error))
                    return
                if not isinstance(report, WorkerCrashed):
                    self._last_pulse[rank] = self._clock.now()
                    awaited[self._pulse[rank].remote()] = rank
                elif report.kind == DistributedError.__name__:
                    secondary = secondary or self._failed(rank, report)
                    until = min(until, time.monotonic() + SECONDARY_DEATH_GRACE_S)
                else:
                    kind = start_error(report.kind)
                    reason = self._failed(rank, report) if kind is EngineDeadError else report.message
                    self._health.die(reason, kind)
                    return
        if secondary:
            self.die(secondary)

    def _silences(self) -> list[tuple[str, float]]:
        now = self._clock.now()
        return [(self._who(rank), now - pulse) for rank, pulse in enumerate(self._last_pulse)]

    def _title(self, rank: int) -> str:
        return f"pagemill: worker {self._first_index + rank}"

    def _who(self, rank: int) -> str:
        home = self._homes[rank]
        return f"{self._title(rank)} (pid {home.pid} on {home.address})"

    def _failed(self, rank: int, crash: WorkerCrashed) -> str:
        return f"{self._who(rank)} failed:\n{crash.traceback}"

    def _gone(self, rank: int, error: Exception) -> str:
        """Ray's report in one line: what it says of the cause, without its advice."""
        _, _, cause = str(error).rpartition("The actor is dead because ")
        cause, _, _ = " ".join(cause.split()).partition(" Some common causes")
        return f"{self._who(rank)} is gone: {cause[:MAX_CAUSE_CHARS]}"
