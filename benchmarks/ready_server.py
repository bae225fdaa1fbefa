"""Waiting for a pagemill server that a benchmark has started. Knows nothing of what is measured."""

import os
import re
import subprocess
import time
from typing import IO, Any


def wait_ready(process: "subprocess.Popen[bytes]", log: IO[Any]) -> int:
    """The port of a server on the loopback, once its log says that it is ready. Raises SystemExit with the log when the
    server has ended instead."""
    while True:
        said = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
        found = re.search(r"ready: http://127\.0\.0\.1:(\d+)", said)
        if found:
            return int(found[1])
        if process.poll() is not None:
            raise SystemExit(f"the server did not start:\n{said}")
        time.sleep(0.005)  # a cold start is measured by it
