"""`own_middleware`: the operator's own ASGI middleware, by the names of `--middleware`. Does not know what it does."""

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

from pagemill.errors import ConfigError


def own_middleware(paths: Iterable[str] | str | None) -> list[Middleware]:
    """Of each dotted path, which is a setting of the operator and imported as such: a class of ASGI middleware, or a
    coroutine function of a request and of what answers it (`async def timed(request, call_next)`). Raises ConfigError
    for a path that leads to neither."""
    given = (paths,) if isinstance(paths, str) else paths or ()
    return [_middleware_of(path) for path in given]


def _middleware_of(path: str) -> Middleware:
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"middleware={path!r} is not allowed: a dotted path, such as package.module.ClassName")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"middleware={path!r} cannot be imported: {error}") from None
    if inspect.isclass(found):
        kind: Any = found
        return Middleware(kind)
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError(f"middleware={path!r} is neither a class nor a coroutine function")
