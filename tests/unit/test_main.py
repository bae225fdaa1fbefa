"""The end of the command's process: its exit code, what was registered for the exit, and what was printed."""

import os
import subprocess
import sys

import pytest

CODE = """
import atexit
import threading
import time

atexit.register(print, "registered before")

import pagemill.__main__ as process

class Held:
    def __del__(self):
        print("taken apart")

held = Held()

def main():
    atexit.register(print, "registered")
    print("printed")
    threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
    {outcome}

process.main = main
process.run()
"""


def ended(outcome, **options):
    command = [sys.executable, "-c", CODE.format(outcome=outcome)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, **options)


@pytest.mark.parametrize("code", [0, 1, 130])
def test_all_was_printed_and_nothing_is_taken_apart(code):
    done = ended(f"return {code}", stdout=subprocess.PIPE)
    assert done.returncode == code
    assert done.stdout == "printed\nthread\nregistered\nregistered before\n"
    assert done.stderr == ""


def test_an_error_that_nobody_caught_is_shown_and_fails():
    done = ended("raise ValueError('broken')", stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stdout == "printed\nthread\nregistered\nregistered before\ntaken apart\n"
    assert "ValueError: broken" in done.stderr


def test_output_that_nobody_takes_is_a_failure():
    reader, writer = os.pipe()
    os.close(reader)
    held_back = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "pagemill", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=held_back, timeout=300)
    os.close(writer)
    assert done.returncode == 120


def test_a_closed_output_does_not_keep_the_process():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m pagemill --version >&-"], stderr=subprocess.PIPE, timeout=60
    )
    assert b"Error" not in done.stderr
