"""`WorkerProcesses`: the processes of one executor: started, watched, ended; and the queues to and from them.

Knows nothing about what is said over the queues.
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from pagemill.errors import ConfigError, EngineDeadError, ModelError, PagemillError, PeerGoneError
from pagemill.log import get_logger
from pagemill.messages.worker_rank import Replicas, WorkerRank, ranks_of
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.codec import Frame
from pagemill.transport.shm_queue import QueueReader, QueueWriter, create_queue
from pagemill.transport.worker_protocol import WorkerCrashed, WorkerReport, WorkerSpec
from pagemill.utils.awake_clock import AwakeClock
from pagemill.utils.processes import Child, describe_exit

logger = get_logger(__name__)

ENTRY = "pagemill.worker.main:run"
SILENT_S = 30.0
"""Without a pulse for so long, a process counts as stopped. Pulses come every second, also while it computes."""
RESULT_SLOT_BYTES = 64 * 1024
REPORT_S = 1.0
MAX_GAP_S = 3.0
"""Between two looks at the clock, which every watcher takes at least every `REPORT_S`. A longer gap tells that this
process itself did not run."""
CERTAIN_S = 2.0
"""How long the end of a queue may precede the news of its process's death."""
_REPORTS = msgspec.msgpack.Decoder(WorkerReport)
_USERS_TO_MEND = {"ConfigError": ConfigError, "ModelError": ModelError}


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
        self._on_death = on_death
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._dead = threading.Event()
        self._death: tuple[type[PagemillError], str] | None = None
        self._watchers: list[threading.Thread] = []
        self._stopping = False
        self._children: list[Child] = []
        self.results: list[QueueReader] = []
        writer_end, self._command_ends = create_queue(sizes[0] * sizes[1])
        self.commands = QueueWriter(writer_end)
        self._folder: PrivateDirectory | None = None
        try:
            self._folder = PrivateDirectory() if sizes != (1, 1) else None
            meeting = f"file://{self._folder.path}/ranks" if self._folder else ""
            for rank in ranks_of(*sizes, meeting, replicas):
                self._start(worker, config, rank, first_index + rank.rank)
        except BaseException:
            self.stop(None, 0.0, 0.0)
            raise
        self._clock = AwakeClock(MAX_GAP_S)
        self._last_pulse = [self._clock.now()] * len(self._children)
        for number, child in enumerate(self._children):
            thread = threading.Thread(
                target=self._watch, args=(number, child), name=f"pagemill-watch-{number}", daemon=True
            )
            self._watchers.append(thread)
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [child.pid for child in self._children]

    def check(self) -> None:
        """Raise EngineDeadError (at start ConfigError or ModelError, where that is the cause) when a worker is gone,
        and EngineDeadError when one gives no pulse. From any thread."""
        if self._death is not None:
            kind, reason = self._death
            raise kind(reason)
        if self._stopping:
            raise EngineDeadError("the workers were stopped")
        now = self._clock.now()
        for child, pulse in zip(self._children, self._last_pulse, strict=True):
            if now - pulse > self._silent_s:
                raise self.die(f"{child.title} has given no sign of life for {now - pulse:.0f} s")

    def check_open(self) -> None:
        """`check`, and notice a queue that has ended before the news of its process's death."""
        self.check()
        if any(reader.ended() for reader in self.results):
            raise self.death_after(PeerGoneError("its queue has ended"))

    def death_after(self, error: PeerGoneError) -> PagemillError:
        """Why the process at the other end of a queue is gone; waits a moment for the news."""
        self._dead.wait(CERTAIN_S)
        return self.die(f"a worker is gone: {error}")

    def die(self, reason: str, kind: type[PagemillError] = EngineDeadError) -> PagemillError:
        """Declare the workers dead. The first reason given is the one that counts; returns it, as an exception."""
        with self._lock:
            is_first = self._death is None and not self._stopping
            kind, reason = self._death or (kind, reason)
            if is_first:
                self._death = kind, reason
        if is_first:
            logger.error("%s", reason)
            self._dead.set()
            if self._on_death is not None:
                self._on_death(EngineDeadError(reason))
        return kind(reason)

    def stop(self, request: Sequence[Frame] | None, ask_s: float, terminate_s: float) -> None:
        """End all processes: `request` is sent first, SIGTERM follows after `ask_s`, SIGKILL `terminate_s` later.
        A second call does nothing."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        if request is not None and self._death is None:
            try:
                self.commands.put(request, ask_s)
            except (PeerGoneError, TimeoutError) as error:
                logger.debug("the workers cannot be asked to stop: %s", error)
        self.commands.close()
        self._wait_for_all(ask_s if self._death is None else 0.0)
        self._signal_all(signal.SIGTERM, terminate_s)
        self._signal_all(signal.SIGKILL, CERTAIN_S)
        for thread in self._watchers:
            if thread is not threading.current_thread():
                thread.join(CERTAIN_S)
        for child in self._children:
            child.kill()
        for reader in self.results:
            reader.close()
        if self._folder is not None:
            self._folder.remove()

    def _signal_all(self, number: int, wait_s: float) -> None:
        running = [child for child in self._children if child.exit_status is None]
        for child in running:
            child.signal(signal.SIGCONT)  # a stopped process gets no SIGTERM before it goes on
            child.signal(number)
        if running:
            self._wait_for_all(wait_s)

    def _wait_for_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for child in self._children:
            child.wait(max(0.0, deadline - time.monotonic()))

    def _start(self, worker: str, config: bytes, rank: WorkerRank, index: int) -> None:
        results, (reader_end,) = create_queue(1, slot_bytes=RESULT_SLOT_BYTES)
        self.results.append(QueueReader(reader_end))
        commands = self._command_ends[rank.rank]
        birth = WorkerSpec(worker=worker, config=config, rank=rank, index=index, commands=commands, results=results)
        try:
            payload = msgspec.msgpack.encode(birth)
            pass_fds = [*commands.fds(), *results.fds()]
            self._children.append(Child(ENTRY, f"pagemill: worker {index}", payload, pass_fds))
        finally:
            results.close()
            commands.close()

    def _watch(self, rank: int, child: Child) -> None:
        """Until the process is gone: note its pulses, and why it ends."""
        try:
            while True:
                content = child.report(REPORT_S)
                now = self._clock.now()
                if content is not None:
                    self._last_pulse[rank] = now
                    self._note(child, content)
        except EOFError:
            status = child.wait(CERTAIN_S)
            how = "its pipe was closed" if status is None else describe_exit(status)
            self.die(f"{child.title} (pid {child.pid}) is gone: {how}")

    def _note(self, child: Child, content: bytes) -> None:
        try:
            report = _REPORTS.decode(content)
        except msgspec.DecodeError as error:
            logger.error("dropped a report of %s: %s", child.title, error)
            return
        if isinstance(report, WorkerCrashed):
            kind = _USERS_TO_MEND.get(report.kind, EngineDeadError)
            self.die(
                report.message if kind is not EngineDeadError else f"{child.title} failed:\n{report.traceback}", kind
            )
