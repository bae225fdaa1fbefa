"""`translated`: the form that a request asks for, as the source of a grammar. Whether a library accepts it is another
question. Knows nothing about tokens, and does in bounded time what does not need the library."""

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pagemill.catalog.grammars import GRAMMARS, GUIDANCE
from pagemill.errors import RequestError
from pagemill.grammar.interface import Form, JsonOptions
from pagemill.grammar.json_schema import supported
from pagemill.grammar.json_values import Budget, OverBudgetError
from pagemill.grammar.structural_tags import TokenOf
from pagemill.messages.structured_outputs import MAX_SPEC_BYTES, FreeStart, StructuredOutputsParams, spec_bytes
from pagemill.utils.sized_cache import SizedCache
from pagemill.utils.text import shown

MAX_CACHE_BYTES: Final = 16 << 20
_MAX_JSON_DEPTH: Final = 100


class TakesTimeError(Exception):
    """It takes more work to translate a form than was to be done."""


def translated(
    params: StructuredOutputsParams,
    backend: str = GUIDANCE,
    max_steps: int | None = None,
    start: FreeStart | None = None,
    token_of: TokenOf = lambda text: None,
) -> str:
    """The source of the grammar, for a backend. Raises RequestError, which names the field; and TakesTimeError for a
    form that takes more than `max_steps` of some microseconds. None: as many as each of its parts may take at all.
    `start`: what may come before the form; `token_of`: finds the tokens that it names."""
    kind = params.kind
    budget = None if max_steps is None else Budget(max_steps)
    try:
        source: str = GRAMMARS.resolve(backend).source(form_of(params, budget, start, token_of))
        source.encode()  # half a surrogate pair, which a schema's text may name, is no character
        return source
    except RequestError:
        raise
    except ValueError as error:
        if budget is not None and isinstance(error, OverBudgetError):
            raise TakesTimeError from None
        raise RequestError(f"{kind}={shown(getattr(params, kind))} is not supported: {error}", kind) from None
    except RecursionError:
        raise RequestError(f"{kind} is nested too deeply", kind) from None


class Translations:
    """`translated`, which remembers what it made, up to a number of bytes."""

    def __init__(
        self, backend: str = GUIDANCE, max_bytes: int = MAX_CACHE_BYTES, token_of: TokenOf = lambda text: None
    ) -> None:
        self._backend = backend
        self._token_of = token_of
        self._sources: SizedCache[bytes, str] = SizedCache(max_bytes, lambda key, source: len(key) + len(source))

    def of(self, params: StructuredOutputsParams, max_steps: int | None = None, start: FreeStart | None = None) -> str:
        """`translated`; what was translated before takes no time."""
        try:
            key = msgspec.msgpack.encode((params, start))
        except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise RequestError(f"{params.kind} is no JSON: {str(error)[:200]}", params.kind) from None
        found = self._sources.get(key)
        return found or self._sources.put(key, translated(params, self._backend, max_steps, start, self._token_of))


def form_of(
    params: StructuredOutputsParams,
    budget: Budget | None = None,
    start: FreeStart | None = None,
    token_of: TokenOf = lambda text: None,
) -> Form:
    """What a request asks for. `budget`: for all the work on it; `start`: what may come before it, where `free_until`
    does not say so; `token_of`: finds the tokens that it names. Raises ValueError that says what is wrong with it."""
    kind = params.kind
    content: Any = getattr(params, kind)

    def schema(given: Any) -> dict[str, Any]:
        return supported(given, disable_additional_properties=params.disable_additional_properties, budget=budget)

    match kind:
        case "json":
            content = schema(_parsed(content, kind))
        case "json_object":
            kind, content = "json", {"type": "object"}
        case "structural_tag":
            content = _parsed(content, kind)
            if not isinstance(content, Mapping):
                raise ValueError("a structural tag is an object")
    options = JsonOptions(params.whitespace_pattern, params.disable_any_whitespace)
    if isinstance(params.free_until, str):
        start = FreeStart(((params.free_until,),))
    return Form(kind, content, options, schema, start, token_of, budget)


def _parsed(value: Any, kind: str) -> Any:
    """An object, or its text. Raises ValueError for what is no JSON, or too large, or too deep."""
    if spec_bytes(value) > MAX_SPEC_BYTES:
        raise ValueError(f"it is too long: at most {MAX_SPEC_BYTES} bytes are allowed")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"it is no JSON: {error}") from None
    if _depth(value, Budget(MAX_SPEC_BYTES)) > _MAX_JSON_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_JSON_DEPTH} levels deep")
    return value


def _depth(value: Any, budget: Budget) -> int:
    """Levels of a JSON value."""
    deepest, level = 0, [value]
    while level and deepest <= _MAX_JSON_DEPTH:
        budget.spend(len(level))
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below
        deepest += 1
    return deepest
