"""`WorkerProcesses`: the processes of one executor: started, watched, ended; and the queues to and from them.

Knows nothing about what is said over the queues.
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from pagemill.engine.executor.worker_health import WorkerHealth
from pagemill.errors import ConfigError, EngineDeadError, PagemillError, PeerGoneError, start_error
from pagemill.log import get_logger
from pagemill.messages.worker_rank import Replicas, WorkerRank, ranks_of
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.codec import Frame
from pagemill.transport.shm_queue import QueueReader, QueueWriter, create_queue
from pagemill.transport.worker_protocol import WorkerCrashed, WorkerReport, WorkerSpec
from pagemill.utils.children import WatchedChild
from pagemill.utils.processes import Child, describe_exit

logger = get_logger(__name__)

ENTRY = "pagemill.worker.main:run"
SILENT_S = 30.0
"""Without a pulse for so long, a process counts as stopped. Pulses come every second, also while it computes."""
RESULT_SLOT_BYTES = 64 * 1024
POLL_S = 1.0
DEATH_REPORT_GRACE_S = 2.0
"""How long the end of a queue may precede the report of its process's death."""
_REPORTS: msgspec.msgpack.Decoder[WorkerReport] = msgspec.msgpack.Decoder(WorkerReport)


class WorkerProcesses:
    """The workers of one replica on this machine, by rank. `commands` reaches all of them; `results[rank]` comes back.

    `on_death` is called once, from a watching thread, when the first of them dies. The thread that constructs this
    must live as long as they shall. Raises ConfigError for sizes that cannot be.
    """

    def __init__(
        self,
        worker: str,
        config: bytes,
        sizes: tuple[int, int],
        *,
        first_index: int = 0,
        replicas: Replicas | None = None,
        on_death: Callable[[EngineDeadError], None] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        if min(sizes) < 1:
            raise ConfigError(f"tensor and pipeline parallel sizes {sizes} are not allowed: at least 1 each")
        self._health = WorkerHealth(self._silences, silent_s, on_death)
        self._watchers: list[threading.Thread] = []
        self._watched: list[WatchedChild[WorkerReport]] = []
        self.results: list[QueueReader] = []
        writer_end, self._command_ends = create_queue(sizes[0] * sizes[1])
        self.commands = QueueWriter(writer_end)
        self._folder: PrivateDirectory | None = None
        try:
            self._folder = PrivateDirectory() if sizes != (1, 1) else None
            rendezvous = f"file://{self._folder.path}/ranks" if self._folder else ""
            for rank in ranks_of(*sizes, rendezvous, replicas):
                self._start(worker, config, rank, first_index + rank.rank)
        except BaseException:
            self.stop(None, 0.0, 0.0)
            raise
        for number, watched in enumerate(self._watched):
            name = f"pagemill-watch-{number}"
            thread = threading.Thread(target=self._watch, args=(watched,), name=name, daemon=True)
            self._watchers.append(thread)
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [watched.child.pid for watched in self._watched]

    def check(self) -> None:
        """Raise EngineDeadError (at start ConfigError or ModelError, where that is the cause) when a worker is gone,
        and EngineDeadError when one gives no pulse. From any thread."""
        self._health.check()

    def die(self, reason: str) -> PagemillError:
        """Declare the workers dead. The first reason given is the one that counts; returns it, as an exception."""
        return self._health.die(reason)

    def check_open(self) -> None:
        """`check`, and notice a queue that has ended before its process's death is reported."""
        self.check()
        if any(reader.ended() for reader in self.results):
            raise self.death_after(PeerGoneError("its queue has ended"))

    def death_after(self, error: PeerGoneError) -> PagemillError:
        """Why the process at the other end of a queue is gone; waits a moment for the report."""
        self._health.wait_for_death(DEATH_REPORT_GRACE_S)
        return self.die(f"a worker is gone: {error}")

    def stop(self, request: Sequence[Frame] | None, grace_s: float, terminate_s: float) -> None:
        """End all processes: `request` is sent first, SIGTERM follows after `grace_s`, SIGKILL `terminate_s` later.
        A second call does nothing."""
        if not self._health.begin_stop():
            return
        if request is not None and not self._health.is_dead:
            try:
                self.commands.put(request, grace_s)
            except (PeerGoneError, TimeoutError) as error:
                logger.debug("the workers cannot be asked to stop: %s", error)
        self.commands.close()
        self._wait_for_all(0.0 if self._health.is_dead else grace_s)
        self._signal_all(signal.SIGTERM, terminate_s)
        self._signal_all(signal.SIGKILL, DEATH_REPORT_GRACE_S)
        for thread in self._watchers:
            if thread is not threading.current_thread():
                thread.join(DEATH_REPORT_GRACE_S)
        for watched in self._watched:
            watched.child.kill()
        for reader in self.results:
            reader.close()
        if self._folder is not None:
            self._folder.remove()

    def _signal_all(self, number: int, wait_s: float) -> None:
        running = [watched.child for watched in self._watched if watched.child.exit_status is None]
        for child in running:
            child.signal(signal.SIGCONT)  # a stopped process gets no SIGTERM before it goes on
            child.signal(number)
        if running:
            self._wait_for_all(wait_s)

    def _wait_for_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for watched in self._watched:
            watched.child.wait(max(0.0, deadline - time.monotonic()))

    def _start(self, worker: str, config: bytes, rank: WorkerRank, index: int) -> None:
        results, (reader_end,) = create_queue(1, slot_bytes=RESULT_SLOT_BYTES)
        self.results.append(QueueReader(reader_end))
        commands = self._command_ends[rank.rank]
        spec = WorkerSpec(worker=worker, config=config, rank=rank, index=index, commands=commands, results=results)
        try:
            payload = msgspec.msgpack.encode(spec)
            pass_fds = [*commands.fds(), *results.fds()]
            child = Child(ENTRY, f"pagemill: worker {index}", payload, pass_fds)
            self._watched.append(WatchedChild(child, _REPORTS, poll_s=POLL_S))
        finally:
            results.close()
            commands.close()

    def _silences(self) -> list[tuple[str, float]]:
        return [(watched.child.title, watched.silent_s) for watched in self._watched]

    def _watch(self, watched: WatchedChild[WorkerReport]) -> None:
        """Read a process's reports until it is gone; say why it ended."""
        child = watched.child
        for report in watched.reports():
            if isinstance(report, WorkerCrashed):
                self._die_of(child, report)
        status = child.wait(DEATH_REPORT_GRACE_S)
        how = "its pipe was closed" if status is None else describe_exit(status)
        self._health.die(f"{child.title} (pid {child.pid}) is gone: {how}")

    def _die_of(self, child: Child, crash: WorkerCrashed) -> None:
        kind = start_error(crash.kind)
        reason = f"{child.title} failed:\n{crash.traceback}" if kind is EngineDeadError else crash.message
        self._health.die(reason, kind)
