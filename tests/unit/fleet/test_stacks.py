"""Asking processes for their stacks: those that do not answer are left in peace."""

import signal
import subprocess
import sys

import pytest

from pagemill.fleet import stacks
from pagemill.fleet.stacks import ask_for_stacks

CODE = """
import signal, subprocess, sys
from pagemill.utils.stacks import write_stacks_on_signals
write_stacks_on_signals()
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
try:
    child.wait()
finally:
    child.kill()
    sys.exit(0 if child.returncode is None else 1)
"""


@pytest.fixture
def family():
    """A process that answers, with a child that does not, as a compiler that was started by a library."""
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.send_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
def test_a_child_without_a_handler_is_not_ended_by_the_question(family, last):
    ask_for_stacks(family.pid, last=last)
    assert family.poll() is None, "its child has not ended"
    assert "most recent call first" in family.stderr.readline()


def test_nobody_is_asked_where_there_is_nobody(monkeypatch):
    monkeypatch.setattr(stacks, "DUMP_S", 0)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    ask_for_stacks(process.pid, last=True)
