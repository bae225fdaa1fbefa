"""Logits processors: name -> class (`LogitsProcessor`); their order here is the order in which they apply."""

from collections.abc import Iterable
from typing import Any

from pagemill.catalog.registry import Registry, load_path
from pagemill.errors import ConfigError

LOGITS: Registry[Any] = Registry(
    "logits processor",
    {
        "grammar": "pagemill.worker.sampling.processors.grammar:GrammarProcessor",
        "allowed_token_ids": "pagemill.worker.sampling.processors.allowed_token_ids:AllowedTokensProcessor",
        "bad_words": "pagemill.worker.sampling.processors.bad_words:BadWordsProcessor",
        "min_tokens": "pagemill.worker.sampling.processors.min_tokens:MinTokensProcessor",
        "logit_bias": "pagemill.worker.sampling.processors.logit_bias:LogitBiasProcessor",
        "penalties": "pagemill.worker.sampling.processors.penalties:PenaltiesProcessor",
    },
)
_BUILT_IN = frozenset(LOGITS._paths)


def processor_paths(added: Iterable[str]) -> tuple[str, ...]:
    """`module:Class` of the processors that are not pagemill's own: lines of plug-ins, then those of the setting
    `logits_processors`."""
    return (*(LOGITS.path(name) for name in LOGITS if name not in _BUILT_IN), *(added))


def load_processors(added: Iterable[str]) -> list[Any]:
    """All classes of logits processors, in the order in which they apply. Raises ConfigError for one that cannot be
    found."""
    return [LOGITS.resolve(name) for name in LOGITS] + [load_path("logits processor", path) for path in added]


def path_of(processor: str | type) -> str:
    """What finds a class again, in this process and in workers. Raises ConfigError for one inside a function."""
    if isinstance(processor, str):
        return processor
    if not isinstance(processor, type) or "<locals>" in processor.__qualname__:
        raise ConfigError(
            f"logits_processors has {processor!r}, which workers cannot import: name a class of a module, or give its "
            "path 'module:Class'"
        )
    return f"{processor.__module__}:{processor.__qualname__}"
