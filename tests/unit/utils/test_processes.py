"""Children: what they are told, how they end, and that none outlives its parent."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from pagemill.utils.processes import Child, describe_exit
from pagemill.utils.stacks import STACKS_SIGNAL

HERE = "tests.unit.utils.test_processes"


def write_payload(payload, report):
    """Entry of a child: what it got, and what it is called."""
    path, _, rest = payload.partition(b"\n")
    title = " ".join(psutil.Process().cmdline())
    Path(os.fsdecode(path)).write_bytes(title.strip().encode() + b"\n" + rest)


def sleep(payload, report):
    """Entry of a child that does nothing, for long."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL if payload == b"obedient" else signal.SIG_IGN)
    Path(os.environ["READY_FILE"]).write_text(str(os.getpid()))
    time.sleep(60)


def tell(payload, report):
    """Entry of a child that reports each line of its payload, then what it reads from a descriptor."""
    *lines, descriptor = payload.split(b"\n")
    for line in lines:
        report(line * 100_000)
    report(os.read(int(descriptor), 100))


def wait_for(path, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


@pytest.fixture
def ready_file(tmp_path, monkeypatch):
    monkeypatch.setenv("READY_FILE", str(tmp_path / "ready"))
    return tmp_path / "ready"


def test_a_child_gets_its_payload_whole_and_its_title(tmp_path):
    payload = b"x" * 300_000  # more than a pipe holds
    with Child(f"{HERE}:write_payload", "pagemill: test 0", str(tmp_path / "out").encode() + b"\n" + payload) as child:
        assert child.wait(60) == 0
    title, _, rest = (tmp_path / "out").read_bytes().partition(b"\n")
    assert title == b"pagemill: test 0"
    assert rest == payload


def test_reports_arrive_whole_and_in_order_and_then_the_end():
    reader, writer = os.pipe()
    with Child(f"{HERE}:tell", "teller", b"ab\nc\n%d" % reader, pass_fds=[reader]) as child:
        os.close(reader)
        assert child.report(60) == b"ab" * 100_000
        assert child.report(60) == b"c" * 100_000
        assert child.report(0.05) is None
        os.write(writer, b"inherited")
        assert child.report(60) == b"inherited"
        with pytest.raises(EOFError, match="teller is gone"):
            child.report(60)
        assert child.wait(60) == 0
    with pytest.raises(EOFError, match="teller was stopped"):
        child.report(0)
    os.close(writer)


@pytest.mark.slow
def test_a_child_gets_the_environment_whatever_the_c_library_holds(tmp_path):
    """setproctitle moves the C library's copy while other threads start children; what they inherit may be half."""
    code = textwrap.dedent(
        f"""
        import ctypes, os
        from pagemill.utils.processes import Child
        ctypes.CDLL(None).clearenv()
        with Child("{HERE}:sleep", "child", b"obedient") as child:
            while not os.path.exists(os.environ["READY_FILE"]):
                assert child.exit_status is None
            child.kill()
        """
    )
    env = os.environ | {"READY_FILE": str(tmp_path / "ready")}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=300).returncode == 0


@pytest.mark.slow
def test_stopping_asks_then_terminates_then_kills(ready_file):
    child = Child(f"{HERE}:sleep", "obedient", b"obedient")
    wait_for(ready_file)
    assert child.stop(grace_s=0) == -signal.SIGTERM
    ready_file.unlink()
    child = Child(f"{HERE}:sleep", "stubborn", b"stubborn")
    wait_for(ready_file)
    assert child.exit_status is None
    assert child.stop(grace_s=0, terminate_s=0.1) == -signal.SIGKILL
    assert child.exit_status == -signal.SIGKILL
    assert child.kill() == -signal.SIGKILL


@pytest.mark.slow
def test_a_stopped_child_can_be_ended(ready_file):
    child = Child(f"{HERE}:sleep", "obedient", b"obedient")
    wait_for(ready_file)
    child.signal(signal.SIGSTOP)
    assert child.stop(grace_s=0) == -signal.SIGTERM


@pytest.mark.slow
def test_a_child_dies_with_its_parent_even_by_sigkill(ready_file):
    code = textwrap.dedent(
        f"""
        import time
        from pagemill.utils.processes import Child
        child = Child("{HERE}:sleep", "orphan", b"stubborn")
        time.sleep(60)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    orphan = psutil.Process(int(wait_for(ready_file)))
    parent.kill()
    parent.wait()
    orphan.wait(timeout=60)
    assert not orphan.is_running()


@pytest.mark.slow
def test_stacks_are_written_on_demand(ready_file, capfd):
    with Child(f"{HERE}:sleep", "sleeper", b"obedient") as child:
        wait_for(ready_file)
        child.signal(STACKS_SIGNAL)
        deadline = time.monotonic() + 10
        text = ""
        while "in sleep" not in text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            text += capfd.readouterr().err
        assert child.exit_status is None
        child.kill()


@pytest.mark.parametrize(
    ("status", "words"), [(1, "exit status 1"), (-9, "killed by SIGKILL"), (-200, "killed by signal 200")]
)
def test_exit_statuses_in_words(status, words):
    assert describe_exit(status) == words
