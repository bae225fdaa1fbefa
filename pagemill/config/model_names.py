"""`ModelNames`: what requests may call the one model of a server. Does not know what a request is."""

from dataclasses import dataclass

from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError

DEFAULT = "default"
"""In an alias: the first of the served names."""


@dataclass(frozen=True)
class ModelNames:
    """Names as they are, and patterns of further ones."""

    served: tuple[str, ...]
    """The first is that of answers and metrics."""
    aliases: tuple[str, ...] = ()
    """Patterns, in which `*` stands for any characters."""

    @classmethod
    def of(cls, config: ServerConfig, model: str) -> "ModelNames":
        """From --served-model-name and --model-alias; `model`: the name where none is given. Raises ConfigError."""
        given = config.served_model_name or (model,)
        served = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))
        if not all(name.strip() for name in served):
            raise ConfigError("served_model_name has an empty name; give a name, or leave the setting out")
        return cls(served, tuple(_pattern_of(alias, served) for alias in config.model_alias or ()))

    def means(self, requested: str) -> bool:
        """Whether a request that names a model so means this one."""
        return requested in self.served or any(_matches(alias, requested) for alias in self.aliases)

    @property
    def listed(self) -> tuple[str, ...]:
        """Names that clients are told of: all that are no patterns."""
        return tuple(dict.fromkeys((*self.served, *(alias for alias in self.aliases if "*" not in alias))))


def _pattern_of(alias: str, served: tuple[str, ...]) -> str:
    pattern, separator, name = alias.rpartition("=")
    if not separator or not pattern or name not in (DEFAULT, *served):
        raise ConfigError(
            f"model_alias={alias!r} is not allowed: PATTERN=NAME, such as 'claude-*=default', where NAME is "
            f"{DEFAULT} or a served name: {', '.join(served)}"
        )
    return pattern


def _matches(pattern: str, name: str) -> bool:
    """In linear time: the parts between the stars are looked for one after the other."""
    first, *others = pattern.split("*")
    if not others:
        return name == pattern
    *middle, last = others
    at = len(first)
    end = len(name) - len(last)
    if end < at or not name.startswith(first) or not name.endswith(last):
        return False
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
