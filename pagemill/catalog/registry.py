"""`Registry`: a named table of lazily imported implementations. Knows nothing about what it holds.

The first look into any table of a process lets plug-ins add their lines (catalog/plugins.py). They only add, so every
process that looks something up sees the same lines, whichever way it was started.
"""

import importlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from pagemill.errors import ConfigError

T = TypeVar("T")

PLUGINS = "pagemill.catalog.plugins:load_plugins"
"""Called before a process first looks into a table. Named, as entries are, because it adds to the tables."""


class Registry(Generic[T]):
    """name -> "module:attribute", imported on first use. Names are unique; unknown names list the known ones.

    `kind` is what an entry is called in error messages, such as "attention backend".
    """

    def __init__(self, kind: str, entries: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._paths: dict[str, str] = {}
        for name, path in (entries or {}).items():
            self.add(name, path)

    def add(self, name: str, path: str) -> None:
        """Add a line. Raises ConfigError when the name is taken by another path or the path is malformed."""
        module, separator, attribute = path.partition(":")
        if not (separator and module and attribute):
            raise ConfigError(f"{self.kind} {name!r}: {path!r} is not of the form 'module:attribute'")
        if self._paths.get(name, path) != path:
            raise ConfigError(f"{self.kind} {name!r} is already registered as {self._paths[name]!r}")
        self._paths[name] = path

    def replace(self, name: str, path: str) -> None:
        """Add a line, in place of one of that name if there is one. Raises ConfigError when the path is malformed."""
        former = self._paths.pop(name, None)
        try:
            self.add(name, path)
        except ConfigError:
            if former is not None:
                self._paths[name] = former
            raise

    def remove(self, name: str) -> None:
        """Take a line out; nothing when there is none of that name."""
        self._paths.pop(name, None)

    def check(self, name: str) -> None:
        """Raise ConfigError that lists the known names, if this is none of them. Imports no entry."""
        if name not in self:
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._paths))}")

    def path(self, name: str) -> str:
        """The "module:attribute" of an entry. Raises ConfigError that lists the known names."""
        self.check(name)
        return self._paths[name]

    def resolve(self, name: str) -> T:
        """Import and return the entry. Raises ConfigError that lists the known names."""
        self.check(name)
        module, _, attribute = self._paths[name].partition(":")
        found: Any = getattr(importlib.import_module(module), attribute)
        return found  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        _load_plugins()
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        _load_plugins()
        return iter(list(self._paths))


def _load_plugins() -> None:
    module, _, function = PLUGINS.partition(":")
    getattr(importlib.import_module(module), function)()


def load_path(kind: str, path: str) -> Any:
    """What "module:callable" names, imported. Raises ConfigError, which calls it a `kind`."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{kind} {path!r} cannot be found; 'module:callable' is expected: {error}") from error
