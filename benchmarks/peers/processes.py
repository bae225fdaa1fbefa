"""Processes of a benchmark, as trees: what they use, how they are started and ended. Knows no engine. Linux only."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from workload import Sizes

PEERS_HOME = Path(os.environ.get("PEERS_HOME", "~/.cache/pagemill-peers")).expanduser()
REPOSITORY = Path(__file__).parents[2]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PATIENCE_S = 600


@dataclass(frozen=True)
class Command:
    """What is started, with variables beside those of this process."""

    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, log: IO[Any] | int, **pipes: Any) -> "subprocess.Popen[str]":
        """In a session of its own; stderr goes to the log, stdout too unless `pipes` says otherwise."""
        return subprocess.Popen(
            self.argv,
            stderr=log,
            text=True,
            env=os.environ | self.environment,
            start_new_session=True,
            **({"stdout": log} | pipes),
        )


def num_cores() -> int:
    """Physical cores that this process may use."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else cpu)
    return len(cores)


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of processes: pages that several share count once."""
    total = 0
    for one in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pid: int) -> float:
    """CPU time that a tree has used, with children that have ended."""
    total = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            total += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / TICKS_PER_S


def machine_cpu_seconds() -> float:
    """CPU time that everybody has used, with what the hypervisor took."""
    values = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (sum(values) - values[3] - values[4]) / TICKS_PER_S


@contextlib.contextmanager
def watched_pss() -> Iterator[list[int]]:
    """Yields a list that holds, at the end of the body, the peak of `pss_bytes` of what was started in it."""
    peak, stop, before = [0], threading.Event(), set(tree(os.getpid()))

    def watch() -> None:
        while not stop.wait(0.1):
            peak[0] = max(peak[0], pss_bytes(pid for pid in tree(os.getpid()) if pid not in before))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def end(process: "subprocess.Popen[str]") -> None:
    """Ask, and after a while kill all that it started."""
    members = tree(process.pid)
    pause(process.pid, False)
    if process.poll() is None:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for pid in [process.pid, *members]:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait()


def pause(pid: int, stopped: bool) -> None:
    """Stop a tree where it is, or let it go on."""
    for one in tree(pid):
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGSTOP if stopped else signal.SIGCONT)


def log_of(name: str) -> Path:
    """Where a contestant's output goes."""
    folder = PEERS_HOME / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name.replace(' ', '-')}.log"


def last_words(name: str) -> str:
    """The end of a contestant's log."""
    return "\n".join(log_of(name).read_text(errors="replace").splitlines()[-15:])


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Engine:
    """One engine's process, which does works on demand: see engines/harness.py."""

    def __init__(self, name: str, command: Command) -> None:
        self.name = name
        start = time.perf_counter()
        with log_of(name).open("w") as log:
            self._process = command.start(log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        try:
            self._answer()
        except BaseException:
            end(self._process)
            raise
        self.started_s = time.perf_counter() - start

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """The rate that a work reached, under the work's name."""
        job = {"work": work, "repetition": repetition, "sizes": asdict(sizes)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return {work: float(self._answer())}

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(30)
        end(self._process)

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}:\n{last_words(self.name)}")
        return json.loads(line)
