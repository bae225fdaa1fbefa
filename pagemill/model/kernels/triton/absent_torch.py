"""`leave_out_torch`: modules of kernels can be imported where torch is not, which takes ten times as long to import as
Triton's compiler. For processes that compile kernels and do nothing else.

What stands for torch has every name, and each is a class without contents: good for annotations, and for constants of
what is called with tensors. The sources of kernels do not name torch.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LEFT_OUT = "torch"


def leave_out_torch() -> None:
    """From now on, in this process, which must not have imported it."""
    sys.meta_path.insert(0, _Finder())


class _Anything(type):
    """A class that has every attribute, and whose call takes everything."""

    def __getattr__(cls, name: str) -> Any:
        return _stands_for(name)

    def __call__(cls, *_: object, **__: object) -> Any:
        return _stands_for(cls.__name__)


class _Module(ModuleType):
    """A module, and package, that has every attribute; always the same."""

    def __getattr__(self, name: str) -> Any:
        found = _stands_for(name)
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _LEFT_OUT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _stands_for(name: str) -> Any:
    """Raises AttributeError for names with which Python, and not who wrote a module, asks for a feature."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})
