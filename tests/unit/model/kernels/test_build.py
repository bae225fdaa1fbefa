"""The library of kernels: whose it must be, and what becomes of compilers when one of them fails."""

import os
import stat
import subprocess

import pytest

from pagemill.model.kernels import build as build_module
from pagemill.model.kernels import native
from pagemill.model.kernels.build import _own, build, prebuilt, prebuilt_name
from pagemill.model.kernels.compile import machine

FAILS_FAST = """#!/bin/sh
case "$*" in
  *attention.cpp*) echo "in file: included" >&2; echo "attention.cpp:7: error: no such thing" >&2; exit 1;;
  *) echo $$ >> "$PIDS"; exec sleep 60;;
esac
"""


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o755)
    path = folder / "k.so"
    path.write_bytes(b"")
    path.chmod(0o755)
    return path


def test_own_files_are_loaded(library):
    assert _own(library) == library


@pytest.mark.parametrize("spoil", ["file", "folder"])
def test_what_everybody_may_write_is_not(library, caplog, spoil):
    path = library if spoil == "file" else library.parent
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    assert _own(library) is None
    assert str(path) in caplog.text
    assert "PAGEMILL_CACHE_ROOT" in caplog.text


def test_what_is_of_another_user_is_not(library, caplog, monkeypatch):
    if library.stat().st_uid == 0:
        os.chown(library, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert _own(library) is None
    assert "of user" in caplog.text


def test_a_compiler_that_fails_ends_the_others(tmp_path, monkeypatch, caplog):
    compiler, pids = tmp_path / "cc", tmp_path / "pids"
    compiler.write_text(FAILS_FAST)
    compiler.chmod(0o755)
    monkeypatch.setenv("PIDS", str(pids))
    monkeypatch.setattr(build_module.envs, "compiler", lambda: str(compiler))
    monkeypatch.setattr(build_module.envs, "cache_home", lambda: tmp_path / "cache")
    assert build() is None
    assert "attention.cpp:7: error: no such thing" in caplog.text
    left = pids.read_text().split() if pids.exists() else []
    assert not [pid for pid in left if _lives(int(pid))]
    assert not list((tmp_path / "cache").rglob("*.o"))


def _lives(pid):
    return subprocess.run(["kill", "-0", str(pid)], capture_output=True, check=False).returncode == 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setattr(build_module.envs, "cache_home", lambda: tmp_path / "cache")
    assert build() is None
    assert len(caplog.records) == 1
    assert "plain torch runs instead" in caplog.text


def test_no_compiler_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build_module.envs, "cache_home", lambda: tmp_path)
    monkeypatch.setattr(build_module.envs, "compiler", lambda: "no-such-compiler")
    assert build() is None
    assert len(caplog.records) == 1
    assert "install g++, set CXX, or install a wheel" in caplog.text


def test_a_compiler_that_takes_too_long_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, caplog):
    def slow(compiler, *rest):
        raise subprocess.TimeoutExpired([compiler], 300)

    monkeypatch.setattr(build_module.envs, "cache_home", lambda: tmp_path)
    monkeypatch.setattr(build_module.envs, "compiler", lambda: "sh")
    monkeypatch.setattr(build_module, "compile_library", slow)
    assert build() is None
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "not compiled within 300 s" in warning
    assert "python -m pagemill.model.kernels.build" in warning


@pytest.fixture
def prebuilt_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "PREBUILT", tmp_path / "prebuilt")
    (tmp_path / "prebuilt").mkdir()
    return tmp_path / "prebuilt"


def test_a_prebuilt_library_is_of_these_sources_and_this_machine(prebuilt_folder):
    assert prebuilt() is None
    (prebuilt_folder / f"{machine()}-of-other-sources.so").write_bytes(b"")
    (prebuilt_folder / prebuilt_name("riscv64")).write_bytes(b"")
    assert prebuilt() is None
    (prebuilt_folder / prebuilt_name(machine())).write_bytes(b"")
    assert prebuilt() == prebuilt_folder / prebuilt_name(machine())


def test_a_prebuilt_library_that_cannot_be_loaded_gives_way_to_one_that_is_compiled(prebuilt_folder, caplog):
    (prebuilt_folder / prebuilt_name(machine())).write_bytes(b"no library")
    before = native.library()
    native.library.cache_clear()
    try:
        again = native.library()
    finally:
        native.library.cache_clear()
        native.library()
    assert "CPU kernels cannot be loaded" in caplog.text
    assert (again is None) == (before is None)
    assert again is None or again.path == before.path
