"""benchmarks/bytecode.py: what a start finds on a machine whose packages come without bytecode."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bytecode(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bytecode")


def torch_at(bytecode, monkeypatch, cached):
    spec = importlib.util.spec_from_loader("torch", None)
    spec.cached = None if cached is None else str(cached)
    monkeypatch.setattr(bytecode.importlib.util, "find_spec", lambda name: spec)


def test_an_installation_is_left_alone(bytecode, monkeypatch, tmp_path):
    (tmp_path / "torch.pyc").touch()
    torch_at(bytecode, monkeypatch, tmp_path / "torch.pyc")
    assert bytecode.compiled({}, tmp_path / "made") == {}
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("cached", [slow(None), "missing.pyc"])
def test_packages_without_bytecode_are_compiled_elsewhere(bytecode, monkeypatch, tmp_path, cached):
    torch_at(bytecode, monkeypatch, cached and tmp_path / cached)
    package = tmp_path / "packages" / "some"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import sys\nprint(__cached__)\n")
    (package / "old.py").write_text("print 'of long ago'\n")
    monkeypatch.setattr(bytecode, "_folders", lambda environment: [str(tmp_path / "packages")])
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    found = bytecode.compiled(environment, tmp_path / "made")
    assert list((tmp_path / "made").rglob("__init__.*.pyc"))
    assert not list(package.rglob("*.pyc"))
    ran = subprocess.run(
        [sys.executable, "-c", "import some, sys; print(sys.dont_write_bytecode)"],
        env=environment | found | {"PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True,
        text=True,
        check=True,
    )
    cached, writes_none = ran.stdout.split()
    assert Path(cached).is_relative_to(tmp_path / "made")
    assert Path(cached).exists()
    assert writes_none == "False"


def test_folders_are_those_of_the_process_that_will_run(bytecode, tmp_path):
    assert str(tmp_path) in bytecode._folders(os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}/nowhere"})
    assert "/nowhere" not in bytecode._folders(os.environ | {"PYTHONPATH": "/nowhere"})
