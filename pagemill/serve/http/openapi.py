"""`document_of`: the OpenAPI document of an application, from its routes and what they say of themselves
(described.py). Does not know what the routes do."""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from pagemill import __version__
from pagemill.serve.http.auth import is_public
from pagemill.serve.http.described import JSON, Description, description_of
from pagemill.serve.http.errors import ANTHROPIC, OLLAMA, OPENAI, form_of_errors
from pagemill.serve.http.schemas.errors import ClaudeError, OllamaError, OpenAIError

STATUSES: Final[dict[int, str]] = {
    400: "the request is not valid: the message names the field, the value and what is allowed",
    401: "the key is missing or wrong",
    403: "a page of another site may have sent it",
    404: "the model is not served here, or nothing here does what is asked for",
    405: "the path does not take the method",
    408: "the request did not arrive in time",
    409: "it cannot be done while requests run",
    413: "the body is too large",
    414: "the URL is too long",
    415: "the body is not JSON by its content type, or compressed",
    429: "this key, or client, has used up what it may; `retry-after` says when to try again",
    431: "the headers are too large, or too many",
    500: "the server failed on this request",
    501: "the model cannot do what is asked for",
    503: "too many requests wait, the engines are down, or the server shuts down; `retry-after` says when to try again",
}
"""Status -> when a request is answered with it."""
OF_ALL: Final = (400, 403, 405, 408, 414, 431, 500, 503)
OF_BODIES: Final = (404, 413, 415, 429)
"""Of routes that take a body, besides."""
_ERRORS: Final[dict[str, type[BaseModel]]] = {OPENAI: OpenAIError, ANTHROPIC: ClaudeError, OLLAMA: OllamaError}
_FORMS: Final = {OPENAI: "", ANTHROPIC: "Claude", OLLAMA: "Ollama"}
_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")
_REFERENCE: Final = "#/components/schemas/{model}"
_INTRODUCTION: Final = (
    "Wherever there is GET, there is HEAD. Answers have the header `x-request-id`. A request gets one of the statuses "
    "that are listed with it, and no other."
)


class Operation(NamedTuple):
    """A method of a path."""

    method: str
    path: str
    summary: str
    description: Description
    is_public: bool
    errors: str
    """The form of its errors."""
    query: tuple[tuple[str, Any], ...]
    """Names and defaults of its query parameters."""
    is_described: bool

    @property
    def statuses(self) -> list[int]:
        """All that it may answer with, but for 200."""
        found = {*OF_ALL, *self.description.statuses}
        if self.description.body is not None:
            found.update(OF_BODIES)
        if not self.is_public:
            found.add(401)
        return sorted(found)


def operations_of(routes: Iterable[BaseRoute]) -> Iterator[Operation]:
    """Those that routes stand for, without HEAD, which comes with GET."""
    for route in routes:
        if not getattr(route, "include_in_schema", False):
            continue
        extra: Mapping[str, Any] = getattr(route, "openapi_extra", None) or {}
        description = description_of(extra)
        path = _PARAMETER.sub(r"{\1}", getattr(route, "path", ""))
        dependant = getattr(route, "dependant", None)
        query = tuple((field.alias, field.default) for field in getattr(dependant, "query_params", ()))
        for method in sorted((getattr(route, "methods", None) or set()) - {"HEAD"}):
            yield Operation(
                method,
                path,
                _summary(getattr(route, "endpoint", None)),
                description or Description(answer=Any),
                is_public(route),
                form_of_errors(path),
                query,
                description is not None,
            )


def document_of(routes: Iterable[BaseRoute], *, with_keys: bool = False, root_path: str = "") -> dict[str, Any]:
    """The document, in version 3.1 of OpenAPI. `with_keys`: routes that are not public need one. `root_path`: what all
    paths begin with."""
    operations = list(operations_of(routes))
    schemas = _schemas(operations)
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas, with_keys)
    components: dict[str, Any] = {
        "schemas": schemas.definitions,
        "responses": {
            f"{_FORMS[form]}Error{status}": {
                "description": why,
                "content": {JSON: {"schema": schemas.of(_ERRORS[form])}},
            }
            for form in _FORMS
            for status, why in STATUSES.items()
        },
    }
    if with_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pagemill", "version": __version__, "description": _INTRODUCTION},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": dict(sorted(paths.items())),
        "components": components,
    }


class _Schemas:
    """JSON schemas of types, and those that they refer to."""

    def __init__(self, models: Iterable[type[BaseModel]]) -> None:
        unique = list(dict.fromkeys(models))
        found, rest = models_json_schema([(model, "validation") for model in unique], ref_template=_REFERENCE)
        self._found = {model: found[model, "validation"] for model in unique}
        self.definitions: dict[str, Any] = rest.get("$defs", {})
        for model in unique:
            _describe_fields(model, self.definitions)

    def of(self, kind: Any) -> dict[str, Any]:
        """Of a model, a list (`list[Model]`), an object (`dict`), a text (`str`), or anything (`Any`)."""
        if kind is str:
            return {"type": "string"}
        if kind is Any:
            return {}
        if getattr(kind, "__origin__", None) is dict:
            return {"type": "object"}
        if getattr(kind, "__origin__", None) is list:
            return {"type": "array", "items": self.of(kind.__args__[0])}
        return self._found[kind]


def _schemas(operations: Iterable[Operation]) -> _Schemas:
    models: list[type[BaseModel]] = list(_ERRORS.values())
    for operation in operations:
        about = operation.description
        kinds: tuple[Any, ...] = (about.body, about.answer, about.event)
        for kind in kinds:
            inner = kind.__args__[0] if getattr(kind, "__origin__", None) is list else kind
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                models.append(inner)
    return _Schemas(models)


def _operation(operation: Operation, schemas: _Schemas, with_keys: bool) -> dict[str, Any]:
    about = operation.description
    name = re.sub(r"\W+", "_", f"{operation.method.lower()}{operation.path}").strip("_")
    written: dict[str, Any] = {"operationId": name, "summary": operation.summary}
    parameters = [
        {"name": found, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for found in _PARAMETER.findall(operation.path)
    ] + [
        {"name": found, "in": "query", "required": False, "schema": _plain_schema(default)}
        for found, default in operation.query
    ]
    if parameters:
        written["parameters"] = parameters
    if about.body is not None:
        written["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.of(about.body)}}}
    error = f"#/components/responses/{_FORMS[operation.errors]}Error"
    errors = {str(status): {"$ref": f"{error}{status}"} for status in operation.statuses}
    written["responses"] = {"200": _answer(about, schemas)} | errors
    if with_keys and not operation.is_public:
        written["security"] = [{"bearer": []}, {"key": []}]
    return written


def _plain_schema(default: Any) -> dict[str, Any]:
    kinds = {bool: "boolean", int: "integer", float: "number"}
    return {"type": kinds.get(type(default), "string"), "default": default}


def _answer(about: Description, schemas: _Schemas) -> dict[str, Any]:
    if about.answer is None:
        return {"description": "done; the body is empty"}
    content: dict[str, Any] = {about.media_type: {"schema": schemas.of(about.answer)}}
    if about.event is not None:
        content[about.stream_type] = {"schema": {}, "x-event-schema": schemas.of(about.event)}
    return {
        "description": "the answer; a stream, where one is asked for" if about.event else "the answer",
        "content": content,
    }


def _summary(endpoint: Any) -> str:
    """The first sentence of what a function says of itself."""
    text = " ".join((inspect.getdoc(endpoint) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _describe_fields(model: type[BaseModel], definitions: Mapping[str, Any]) -> None:
    """Add what the texts below fields say of them."""
    properties = definitions.get(model.__name__, {}).get("properties", {})
    for name, text in field_texts(model).items():
        if name in properties:
            properties[name]["description"] = text


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the text below it in the source, for those that have one; of base classes too."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls.__module__ != BaseModel.__module__:
            found |= _own_texts(cls)
    return found


@cache
def _own_texts(cls: type) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    statements = node.body if isinstance(node, ast.ClassDef) else []
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(statements)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
