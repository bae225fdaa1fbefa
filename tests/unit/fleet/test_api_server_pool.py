"""Front ends that start, die, stop and come back, as scripts instead of servers."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from pagemill.errors import EngineDeadError
from pagemill.fleet import api_server_pool
from pagemill.fleet.api_server_pool import ApiServerPool
from pagemill.messages.process_reports import FrontEndPulse, Listening
from pagemill.utils import children

pytestmark = pytest.mark.slow

HERE = "tests.unit.fleet.test_api_server_pool"
PATIENCE_S = 120


class ScriptSpec(msgspec.Struct):
    """What a scripted front end is given."""

    words: list[str]
    secret: str = ""
    load_fd: int = -1


def front_end(payload, report):
    """A front end's life by script; the last word is repeated until it is ended."""
    words = msgspec.msgpack.decode(payload, type=ScriptSpec).words
    while True:
        match words.pop(0) if len(words) > 1 else words[0]:
            case "listen":
                report(msgspec.msgpack.encode(Listening()))
            case "pulse":
                report(msgspec.msgpack.encode(FrontEndPulse()))
            case "exit":
                os._exit(3)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.02)


class Pool:
    """Forgets what it is told."""

    def take(self, index, counts):
        pass

    def lost(self, index):
        pass


class Case:
    """One front end with a script for each of its lives, the last for all later ones. For those of `no_process`, no
    process can be made."""

    def __init__(self, monkeypatch, *scripts, no_process=(), engines=list, **arguments):
        self.num_lives = 0
        self.lost = threading.Event()
        real = api_server_pool.Child

        def child(entry, title, payload, pass_fds):
            self.num_lives += 1
            if self.num_lives in no_process:
                raise OSError(24, "Too many open files")
            script = scripts[min(self.num_lives, len(scripts)) - 1]
            return real(f"{HERE}:front_end", title, msgspec.msgpack.encode(ScriptSpec(script.split())), pass_fds)

        monkeypatch.setattr(api_server_pool, "Child", child)
        self.sock = socket.socket()
        self.servers = ApiServerPool(
            1, lambda index: ScriptSpec([]), self.sock, engines, Pool(), on_lost=self.lost.set, **arguments
        )
        self.servers.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.servers.stop(0.0)
        self.sock.close()

    def wait_for_life(self, number):
        deadline = time.monotonic() + PATIENCE_S
        while self.num_lives < number:
            assert time.monotonic() < deadline, f"life {number} did not come"
            time.sleep(0.01)


def test_a_first_start_that_fails_is_not_repeated(monkeypatch):
    with Case(monkeypatch, "exit") as case, pytest.raises(EngineDeadError, match="could not start: exit status 3"):
        case.servers.wait_listening()
    assert case.num_lives == 1


@pytest.mark.slow
def test_later_starts_that_fail_are_tried_again_with_pauses(monkeypatch):
    scripts = "listen pulse pulse exit", "exit", "listen pulse"
    with Case(monkeypatch, *scripts, no_process=(3,)) as case:
        case.servers.wait_listening()
        case.wait_for_life(2)
        begin = time.monotonic()
        case.wait_for_life(4)
        assert time.monotonic() - begin > 1 + 2, "the pauses after a death at start, and after no process at all"
        assert not case.servers.lost


@pytest.mark.slow
def test_it_is_given_up_at_last(monkeypatch):
    monkeypatch.setattr(children, "MAX_FAILED_STARTS", 3)
    monkeypatch.setattr(children, "FIRST_PAUSE_S", 0.01)
    with Case(monkeypatch, "listen exit", "exit") as case:
        assert case.lost.wait(PATIENCE_S)
        assert case.servers.lost
    assert case.num_lives == 4


def test_one_that_is_not_watched_any_more_counts_as_given_up(monkeypatch):
    def engines():
        raise RuntimeError("nobody knows")

    with Case(monkeypatch, "listen exit", engines=engines) as case:
        assert case.lost.wait(PATIENCE_S)
        assert case.servers.lost


def test_one_that_never_says_a_word_is_replaced(monkeypatch):
    with (
        Case(monkeypatch, "nothing", start_s=0.5) as case,
        pytest.raises(EngineDeadError, match=r"could not start: it gave no sign of life for 0\.5 s and was killed"),
    ):
        case.servers.wait_listening()


@pytest.mark.slow
def test_one_that_is_stopped_is_replaced(monkeypatch):
    with Case(monkeypatch, "listen pulse stop", "listen pulse", silent_s=3) as case:
        case.servers.wait_listening()
        stopped = case.servers.pids()[0]
        case.wait_for_life(2)
        assert not Path(f"/proc/{stopped}").exists()
        time.sleep(4)
        assert case.num_lives == 2, "the next one gives signs of life"
