"""`import pagemill.vllm`, before `import vllm`: scripts that were written for vLLM run with pagemill, unchanged.

From then on `vllm` and its modules are made of the table of names in `catalog.vllm_names`, also where vLLM is
installed. What has no counterpart is an ImportError that says what to do instead. `python -m pagemill.vllm SCRIPT` does
the same for a script that is not to be edited. Nothing is imported before a name is asked for.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from pagemill.catalog.vllm_names import MISSING, NAMES, VERSION

PACKAGE = "vllm"
_ADVICE = "use the names of pagemill itself, or see docs/drop-in.md for those that are there"


class VllmModule(ModuleType):
    """One module of the table. Its names are imported when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        """Raises ImportError, which says what to do, for a name that has no counterpart."""
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        path = NAMES.get(self.__name__, {}).get(name)
        full = f"{self.__name__}.{name}"
        if path is None:
            if is_module(full):
                return importlib.import_module(full)
            raise ImportError(f"{full} has no counterpart in pagemill: {advice(full)}", name=self.__name__)
        module, _, attribute = path.partition(":")
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES.get(self.__name__, {})})


class VllmFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `vllm` and the modules below it in the table, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for other packages. Raises ModuleNotFoundError, which says what to do, for a module without
        counterpart."""
        if fullname.partition(".")[0] != PACKAGE:
            return None
        if not is_module(fullname):
            raise ModuleNotFoundError(f"{fullname} has no counterpart in pagemill: {advice(fullname)}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=has_inner(fullname))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> VllmModule:
        """An empty module of the name."""
        return VllmModule(spec.name, f"Names of vLLM {VERSION} that pagemill answers to.")

    def exec_module(self, module: ModuleType) -> None:
        """Give it its constants; everything else is looked up when it is asked for."""
        module.__all__ = sorted(NAMES.get(module.__name__, ()))  # type: ignore[attr-defined]
        if module.__name__ in (PACKAGE, f"{PACKAGE}.version"):
            module.__version__ = VERSION  # type: ignore[attr-defined]


def is_module(name: str) -> bool:
    """Whether a dotted name is a module of the table, or a package that has one."""
    return name in NAMES or has_inner(name)


def has_inner(name: str) -> bool:
    """Whether modules of the table lie below this name."""
    return any(other.startswith(f"{name}.") for other in NAMES)


def advice(name: str) -> str:
    """What to do instead of a name: that of the name itself, or of the nearest module that holds it."""
    while name:
        if name in MISSING:
            return MISSING[name]
        name = name.rpartition(".")[0]
    return _ADVICE


def install() -> None:
    """Let `import vllm` find the names of the table; a second call does nothing. Raises ImportError when vLLM itself
    was imported before."""
    if any(isinstance(finder, VllmFinder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        raise ImportError("vllm is imported already: import pagemill.vllm first", name=PACKAGE)
    sys.meta_path.insert(0, VllmFinder())


install()
