"""A `pagemill serve` process for tests: started on a free port, stopped by SIGTERM."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

READY = re.compile(r"(http://127\.0\.0\.1:\d+)")
START_LIMIT_S = 300


class ServerProcess:
    """The process, its base URL, and what it has logged so far."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pagemill", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_until_ready()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.lines):
                if match := READY.search(line):
                    return match[1]
            time.sleep(0.02)
        self.process.kill()
        raise RuntimeError("the server did not get ready:\n" + "".join(self.lines))

    def stop(self) -> int:
        """SIGTERM, then the exit status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self._reader.join(60)
        if self.process.stdout:
            self.process.stdout.close()
        return status


@contextmanager
def running_server(*arguments: str) -> Iterator[ServerProcess]:
    """A server for the body; killed if it does not stop by itself."""
    server = ServerProcess(*arguments)
    try:
        yield server
        server.stop()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        server._reader.join(60)
        if server.process.stdout:
            server.process.stdout.close()
