import os
import subprocess

import pytest

from pagemill.model.kernels.build import prebuilt_name
from pagemill.model.kernels.compile import machine
from tools import try_wheel


@pytest.fixture
def wheels(tmp_path):
    for seconds, version in enumerate(["0.2", "0.1"]):
        path = tmp_path / f"pagemill-{version}-py3-none-manylinux_2_17_{machine()}.whl"
        path.write_bytes(b"")
        os.utime(path, (seconds, seconds))
    return tmp_path


def test_the_last_one_for_this_machine(wheels):
    assert try_wheel.newest_wheel(wheels).name.startswith("pagemill-0.1-")


def test_there_is_none(tmp_path, capsys):
    assert try_wheel.main([str(tmp_path)]) == 1
    assert "`make wheel` builds one" in capsys.readouterr().err


class Machine:
    """A machine on which the kernels are at `kernels`, and the model says `answer`."""

    def __init__(self, kernels, answer, log=""):
        self.kernels = kernels
        self.answer = answer
        self.log = log
        self.paths = set()

    def run(self, command, *, env=None, **options):
        """In place of subprocess.run."""
        if env is None:
            return subprocess.CompletedProcess(command, 0)
        self.paths.add(env["PATH"])
        if command[1] == "-c":
            return subprocess.CompletedProcess(command, 0, f"{self.kernels} avx2\n", "")
        return subprocess.CompletedProcess(command, 0, self.answer, self.log)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Machine(f"/site/{prebuilt_name(machine())}", "Paris."), None),
        (Machine("/cache/kernels/k.so", "Paris."), "its kernels are not used"),
        (Machine(f"/site/{prebuilt_name(machine())}", "London."), "London"),
        (Machine(f"/site/{prebuilt_name(machine())}", "Paris.", "plain torch runs instead"), "plain torch"),
    ],
)
def test_what_a_wheel_must_do(wheels, monkeypatch, capsys, case, message):
    monkeypatch.setattr(try_wheel.aliases, "fetch", lambda name: None)
    monkeypatch.setattr(subprocess, "run", case.run)
    assert try_wheel.main([str(wheels)]) == (0 if message is None else 1)
    assert message is None or message in capsys.readouterr().err
    assert all(path.endswith("venv/bin") for path in case.paths)
