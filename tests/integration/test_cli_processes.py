"""The command line as users run it: in a process of its own, on a pseudo-terminal, and into a pipe."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.openai_server import FakeOpenAIServer

TIMEOUT_S = 120.0
CTRL_C, CTRL_D = b"\x03", b"\x04"
# The new session takes the terminal as its controlling one, so that Ctrl-C becomes SIGINT.
LAUNCH = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # not ignored, whatever started the tests
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "pagemill", *sys.argv[1:]])
"""


@pytest.fixture
def server() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer() as server:
        yield server


class Terminal:
    """A pagemill process on a pseudo-terminal."""

    def __init__(self, home: Path, *argv: str) -> None:
        self._master, slave = pty.openpty()
        env = os.environ | {"PAGEMILL_CACHE_ROOT": str(home), "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-c", LAUNCH, *argv]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.output = ""

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def expect(self, pattern: str) -> None:
        """Read until the pattern is in what came after the last match."""
        end_s = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self.output)):
            assert time.monotonic() < end_s, f"no {pattern!r} in {self.output!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self.output += os.read(self._master, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"ended without {pattern!r}: {self.output!r}") from None
        self.output = self.output[found.end() :]

    def close(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        os.close(self._master)
        return code


def test_a_chat_on_a_terminal(server: FakeOpenAIServer, tmp_path: Path):
    terminal = Terminal(tmp_path, "chat", "--url", server.url)
    terminal.expect("> ")
    terminal.type(b"Tell me.\r")
    terminal.expect("The .*ocean.* is wide")
    terminal.expect("4 tokens, .* tokens/s, first token after")
    server.script.pieces, server.script.delay_s = ["word "] * 5000, 0.02
    terminal.expect("> ")
    terminal.type(b"Go on.\r")
    terminal.expect("word word")
    terminal.type(CTRL_C)
    terminal.expect("stopped, ")
    server.script.pieces = ["Still here."]
    terminal.expect("> ")
    terminal.type(b"Are you there?\r")
    terminal.expect("Still here")
    terminal.expect("> ")
    terminal.type(CTRL_D)
    assert terminal.close() == 0
    assert server.num_aborted == 1
    assert [message["role"] for message in server.bodies[-1]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    history = tmp_path / "chat_history"
    assert "Are you there?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_completion_on_a_terminal_has_a_faint_last_line(server: FakeOpenAIServer, tmp_path: Path):
    terminal = Terminal(tmp_path, "complete", "Hi", "--url", server.url)
    terminal.expect(r"The \*\*ocean\*\* is wide\.\r\n\x1b\[2m4 tokens, .*\x1b\[0m")
    assert terminal.close() == 0


def test_ctrl_c_ends_a_completion_with_130_and_aborts_the_request(server: FakeOpenAIServer, tmp_path: Path):
    server.script.pieces, server.script.delay_s = ["word "] * 5000, 0.02
    terminal = Terminal(tmp_path, "complete", "Hi", "--url", server.url)
    terminal.expect("word word")
    terminal.type(CTRL_C)
    assert terminal.close() == 130
    assert "Traceback" not in terminal.output
    wait_for_abort(server)


def test_a_reader_that_leaves_is_no_error(server: FakeOpenAIServer):
    server.script.pieces = ["word "] * 200
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemill", "complete", "Hi", "--url", server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(5) == b"word "
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(TIMEOUT_S) == 141
    wait_for_abort(server)


def test_help_is_quick():
    """In processor time, which does not depend on what else the machine does."""
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "pagemill", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.3


def wait_for_abort(server: FakeOpenAIServer) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while server.num_aborted == 0:
        assert time.monotonic() < end_s, "the server was not told"
        time.sleep(0.02)
