"""Compiled modules that Triton loads, of which all of a kind have one name: each thread gets the one that it asked for.

A kernel is launched by a small module in C, compiled for the types of its arguments and named as all others are. When
Python is to load such a module a second time, as for another kernel with the same types, it fills the module that it
finds in `sys.modules` under that name with the contents of the right one. That module is another kernel's, whose thread
may not have looked into it yet: it would launch its kernel with arguments that are cut for this one.
"""

import sys
from collections.abc import Callable
from functools import partial
from threading import Lock
from types import ModuleType

from triton.runtime import build

_LOADER = "_load_module_from_path"

_loading = Lock()


def keep_apart() -> None:
    """From now on, in this process. Of no effect with a Triton that loads modules by another way."""
    load = getattr(build, _LOADER, None)
    if load is not None and not (isinstance(load, partial) and load.func is _load_alone):
        setattr(build, _LOADER, partial(_load_alone, load))


def _load_alone(load: Callable[[str, str], ModuleType], name: str, path: str) -> ModuleType:
    """What `load` returns, and no one else has or gets."""
    with _loading:
        sys.modules.pop(name, None)
        try:
            return load(name, path)
        finally:
            sys.modules.pop(name, None)
