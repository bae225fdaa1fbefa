"""torch's library is there before torch is, and `import torch` works whatever became of it."""

import importlib.machinery
import importlib.util
import subprocess
import sys

import pytest

from pagemill.utils.torch_libraries import load_torch_library, source_only

CODE = """
import sys
from pathlib import Path
from pagemill.utils.torch_libraries import load_torch_library

gpu_build = any((Path(sys.argv[1]) / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip", "xpu"))
assert load_torch_library() is not gpu_build
assert "torch" not in sys.modules
assert gpu_build or "/libtorch_cpu.so" in Path("/proc/self/maps").read_text()
import torch
assert torch.ones(3).sum() == 3
assert not load_torch_library()
"""


@pytest.fixture
def torch_in(tmp_path, monkeypatch):
    """A folder in which torch's libraries seem to lie; the real one is not imported yet."""
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "lib").mkdir()
    return tmp_path / "lib"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it is loaded ahead on Linux only")
def test_the_library_is_loaded_and_torch_uses_it():
    folder = importlib.util.find_spec("torch").submodule_search_locations[0]
    subprocess.run([sys.executable, "-c", CODE, f"{folder}/lib"], check=True, timeout=300)


def test_a_library_that_cannot_be_loaded_is_left_to_the_import(torch_in):
    assert not load_torch_library()
    (torch_in / "libtorch_cpu.so").write_text("not a library")
    assert not load_torch_library()


def test_without_torch_nothing_happens(torch_in, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not load_torch_library()


@pytest.mark.parametrize("kind", ["cuda", "hip", "xpu"])
def test_builds_for_gpus_load_their_libraries_themselves(torch_in, monkeypatch, kind):
    (torch_in / f"libtorch_{kind}.so").touch()
    monkeypatch.setattr("ctypes.CDLL", None)  # whoever asks it to load something gets a TypeError
    assert not load_torch_library()


@pytest.mark.parametrize(("cached", "there"), [("made.pyc", True), ("missing.pyc", False), (None, True)])
def test_torch_without_bytecode_is_told_by_its_folder(torch_in, tmp_path, cached, there):
    (tmp_path / "made.pyc").touch()
    importlib.util.find_spec("torch").cached = cached and str(tmp_path / cached)
    assert source_only() == (None if there else tmp_path.parent)


def test_without_torch_there_is_no_bytecode_to_miss(torch_in, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert source_only() is None
