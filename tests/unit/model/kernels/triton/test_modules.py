"""Modules of one name that Triton compiles and loads stay what they are."""

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.fakes.triton_interpreter import DEVICE  # noqa: F401  # the interpreter, for what this imports

from triton.runtime import build  # isort: skip
from pagemill.model.kernels.triton import modules  # isort: skip

NAME = "__triton_launcher"
SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Load the module of a number, as Triton loads launchers."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("Python's headers are not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    modules.keep_apart()
    return lambda number: build.compile_module_from_src(SOURCE.replace("NUMBER", str(number)), NAME)


def test_a_module_that_is_loaded_again_leaves_the_others_as_they_are(load):
    first, second = load(35), load(51)
    again = load(35)
    assert [each.launch() for each in (first, second, again)] == [35, 51, 35]
    assert len({id(each) for each in (first, second, again)}) == 3
    assert NAME not in sys.modules


def test_asking_twice_changes_nothing(load):
    once = build._load_module_from_path
    modules.keep_apart()
    assert build._load_module_from_path is once


def test_a_triton_without_that_loader_is_left_alone(monkeypatch):
    monkeypatch.delattr(build, "_load_module_from_path")
    modules.keep_apart()
    assert not hasattr(build, "_load_module_from_path")
