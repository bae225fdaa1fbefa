"""The structs that Python mirrors are laid out as the library says."""

import ctypes

import pytest

from pagemill.model.kernels import mirrors, native


def test_every_struct_is_checked_when_the_library_is_loaded(library, monkeypatch):
    class Shifted(ctypes.Structure):
        _fields_ = (("blocks", ctypes.c_int32), ("stride", ctypes.c_int32), ("block_size", ctypes.c_int64))

    monkeypatch.setitem(mirrors.MIRRORS, "PmTable", Shifted)
    with pytest.raises(RuntimeError, match=r"PmTable is laid out as \[24, 0, 8, 16\].*Shifted"):
        native._load(library.path)
    monkeypatch.setitem(mirrors.MIRRORS, "PmTable", mirrors.TableStruct)
    native._load(library.path)


def test_a_name_that_the_library_does_not_know_is_an_error(library, monkeypatch):
    monkeypatch.setitem(mirrors.MIRRORS, "PmNothing", mirrors.TableStruct)
    with pytest.raises(RuntimeError, match="PmNothing"):
        native._load(library.path)
