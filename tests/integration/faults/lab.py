"""The lab: a server with all its processes, and the means to hurt it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import pytest

LONG = os.environ.get("FAULTS") == "long"
"""`make faults`: the large counts."""
SCRIPTED = "tests.integration.faults.worker:LabWorker"
READY = re.compile(r"ready: (http://127\.0\.0\.1:\d+)")


def long_only(*values):
    """Cases of a test that the short form leaves out, because others show nearly the same."""
    return [pytest.param(value, marks=pytest.mark.faults) for value in values]


PATIENCE_S = 120
"""Nothing takes so long, on whatever machine."""


def wait_for(condition, what="it", patience_s=PATIENCE_S):
    """The first true value of `condition`."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {patience_s} s"
        time.sleep(0.01)
    return value


class Server:
    """A `pagemill serve` process and its descendants. `plain` is the command itself, without the lab's hooks; `prefix`
    a command that starts it."""

    def __init__(self, checkpoint, *arguments, scripted=False, plain=False, stderr=None, ready=True, prefix=(), **env):
        self.folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))  # a short path: sockets are in it
        self.log_path = self.folder / "log"
        module = "pagemill" if plain else "tests.integration.faults.served"
        arguments = [str(checkpoint), "--dtype", "float32", "--cpu-threads", "1", "--port", "0", *map(str, arguments)]
        if "--num-gpu-blocks-override" not in arguments:
            arguments += ["--num-gpu-blocks-override", "2000"]
        sockets = self.folder / "s"
        sockets.mkdir()
        env = {"LAB_FOLDER": self.folder, "PAGEMILL_RPC_BASE_PATH": sockets, "OMP_NUM_THREADS": 1, **env}
        if scripted:
            env["LAB_WORKER"] = SCRIPTED
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stderr or log,
                stderr=stderr or log,
                env=dict(os.environ) | {name: str(value) for name, value in env.items()},
                start_new_session=True,
            )
        self.url = None
        if ready:
            self.wait_ready()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if kind is not None:
            print(self.log[-20_000:])
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    def wait_ready(self):
        def found():
            assert self.process.poll() is None, self.log
            return READY.search(self.log)

        self.url = wait_for(found, "readiness")[1]

    def tree(self):
        """All processes, this server's first."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def titles(self):
        return sorted(filter(None, map(title, self.tree())))

    def pid(self, name):
        """Of the process with this title, once there is one."""
        named = f"pagemill: {name}"
        return wait_for(lambda: next((p.pid for p in self.tree() if title(p) == named), None), named)

    def kill(self, name, number=signal.SIGKILL):
        """Signal a process by title; its id."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def status(self, path="/health"):
        """HTTP status of a GET."""
        return httpx.get(self.url + path, timeout=300).status_code

    def wait_healthy(self):
        wait_for(lambda: self.status() == 200, "health")

    @contextlib.contextmanager
    def pace(self, step_s):
        """Meanwhile each step of a scripted worker takes so long, from the next one on. For what must happen before
        requests are finished, on however slow a machine."""
        path = self.folder / "step_s"
        written = path.with_suffix(".new")
        written.write_text(str(step_s))
        written.rename(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def figures(self):
        return httpx.get(self.url + "/lab/figures", timeout=300).json()

    def all_blocks_are_free(self):
        return httpx.post(self.url + "/lab/reset", timeout=300).json() is True

    def wait_empty(self):
        """Until no request is left anywhere."""
        wait_for(self.all_blocks_are_free, "that all blocks are free")

    def stop(self, number=signal.SIGTERM):
        """Signal it, then its exit status. All its processes must be gone, and its sockets."""
        processes = self.tree()
        self.process.send_signal(number)
        return self.wait_gone(processes)

    def wait_gone(self, processes):
        status = self.process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(processes[1:], 60)
        assert not alive
        assert not list((self.folder / "s").iterdir()), "the socket folder is left"
        return status


def title(process):
    """As in `ps`."""
    try:
        return " ".join(process.cmdline()).strip()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
