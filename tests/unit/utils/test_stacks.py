"""A process writes its stacks and lives on, whatever its threads do meanwhile."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from pagemill.utils.stacks import LAST_STACKS_SIGNAL, STACKS_SIGNAL, write_stacks

BUSY = """
import threading, time
from pagemill.utils.stacks import write_stacks_on_signals
write_stacks_on_signals()
def short_lived_frames():
    while True:
        names = {}
        exec(compile("def down(n): return down(n - 1) if n else 0", "x" * 200, "exec"), names)
        names["down"](60)
        names.clear()
for _ in range(3):
    threading.Thread(target=short_lived_frames, daemon=True).start()
print("up", flush=True)
while True:
    time.sleep(0.05)
"""
F_SETPIPE_SZ = 1031


@pytest.fixture
def busy():
    """A process whose threads make and leave functions all the time, and the reading end of its stderr: a small pipe,
    so that a writer of stacks often has to wait for its reader."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, 4096)
    # Memory that is given back is overwritten, so that reading it is noticed.
    environment = os.environ | {"PYTHONMALLOC": "debug"}
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=writer, text=True, env=environment
    )
    os.close(writer)
    assert process.stdout.readline() == "up\n"
    with process:
        yield process, reader
        process.kill()
    os.close(reader)


def read_some(reader, num_bytes):
    """What is written, up to `num_bytes` or a pause."""
    text = b""
    while len(text) < num_bytes and select.select([reader], [], [], 0.2)[0]:
        part = os.read(reader, 300)
        if not part:
            break
        text += part
    return text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe is set")
def test_a_busy_process_survives_being_asked(busy):
    """faulthandler's handler ended it at the second or third signal, as it reads frames of running threads."""
    process, reader = busy
    text = b""
    for _ in range(20):
        process.send_signal(STACKS_SIGNAL)
        text += read_some(reader, 6000)
        assert process.poll() is None
    assert b"in short_lived_frames" in text


def test_the_last_stacks_are_written_while_native_code_holds_the_interpreter():
    code = (
        "import ctypes\n"
        "from pagemill.utils.stacks import write_stacks_on_signals\n"
        "write_stacks_on_signals()\n"
        "native = ctypes.PyDLL(None)\n"
        "print('up', flush=True); native.sleep(600)\n"  # one line: it may still be at the first half of it
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(LAST_STACKS_SIGNAL)
        lines = [process.stderr.readline(), process.stderr.readline()]
        process.kill()
    assert 'File "<string>", line 5' in lines[1]
    assert process.returncode == -signal.SIGKILL


def test_every_thread_is_written(capfd):
    done = threading.Event()

    def waits_in_a_thread():
        done.wait()

    thread = threading.Thread(target=waits_in_a_thread)
    thread.start()
    write_stacks()
    done.set()
    thread.join()
    text = capfd.readouterr().err
    assert "in waits_in_a_thread" in text
    assert "in test_every_thread_is_written" in text
