"""GET /openapi.json and /docs: what the routes of this server are, for programs and for people. The page is one file:
it loads nothing and runs nothing."""

import asyncio
import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.serve.http.described import describes
from pagemill.serve.http.openapi import document_of

router = APIRouter()
HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c;"
    "background:#fff}code,pre{font:13px/1.4 ui-monospace,monospace}summary{cursor:pointer;padding:.3rem 0}"
    "table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #ccc;padding:.2rem .5rem;text-align:left;"
    "vertical-align:top}pre{overflow:auto;background:#f4f4f4;padding:.5rem}details{border-bottom:1px solid #ddd}"
    "@media(prefers-color-scheme:dark){body{background:#161616;color:#e6e6e6}pre{background:#222}"
    "td,th,details{border-color:#444}a{color:#8ab4f8}}"
)


@router.get("/openapi.json", response_model=None, openapi_extra=describes(dict[str, Any]))
async def openapi(request: Request) -> Response:
    """The OpenAPI document of this server's routes."""
    return Response(msgspec.json.encode(await _document(request)), media_type="application/json", headers=HEADERS)


@router.get("/docs", response_model=None, openapi_extra=describes(str, media_type="text/html"))
async def docs(request: Request) -> Response:
    """The same as a page, which loads nothing from elsewhere."""
    page = await asyncio.to_thread(page_of, await _document(request))
    return Response(page, media_type="text/html; charset=utf-8", headers=HEADERS)


async def _document(request: Request) -> Mapping[str, Any]:
    """Made when it is first asked for, on a thread: it takes most of a second."""
    app = request.app
    found: Mapping[str, Any] | None = getattr(app.state, "openapi", None)
    if found is None:
        state = app.state
        found = await asyncio.to_thread(
            document_of, app.router.routes, with_keys=state.needs_key, root_path=state.root_path
        )
        app.state.openapi = found
    return found


def page_of(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as a page of HTML."""
    info = document["info"]
    title = html.escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{_text(info['description'])}</p><p>As JSON: <a href='openapi.json'>/openapi.json</a></p>"
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(method.upper(), path, operation, document["components"]["responses"])
    parts.append("<h2>Schemas</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += _schema(name, schema)
    parts.append("</body></html>")
    return "".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any], responses: Mapping[str, Any]) -> Iterator[str]:
    anchor = html.escape(operation["operationId"])
    yield f'<details id="{anchor}"><summary><code>{method} {html.escape(path)}</code> {_text(operation["summary"])}'
    yield "</summary><table><tr><th></th><th>content type</th><th>schema</th><th></th></tr>"
    for parameter in operation.get("parameters", ()):
        yield _row(f"{parameter['in']} {parameter['name']}", "", _shown(parameter["schema"]), "")
    if "requestBody" in operation:
        for kind, body in operation["requestBody"]["content"].items():
            yield _row("body", kind, _shown(body["schema"]), "")
    for status, response in operation["responses"].items():
        found = responses[response["$ref"].rpartition("/")[2]] if "$ref" in response else response
        if not found.get("content"):
            yield _row(status, "", "", _text(found["description"]))
        for kind, body in found.get("content", {}).items():
            schema = body.get("x-event-schema", body["schema"])
            yield _row(status, kind, _shown(schema), _text(found["description"]))
    yield "</table></details>"


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f'<details id="schema-{html.escape(name)}"><summary><code>{html.escape(name)}</code> '
    yield f"{_text(schema.get('description', ''))}</summary><table><tr><th>field</th><th>type</th><th></th></tr>"
    required = schema.get("required", ())
    for field, about in schema.get("properties", {}).items():
        needed = "needed. " if field in required else ""
        yield _row(html.escape(field), _shown(about), _text(needed + about.get("description", "")))
    yield "</table></details>"


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _text(text: str) -> str:
    """Plain text, with what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _shown(schema: Mapping[str, Any]) -> str:
    """A type in a few words, with links to schemas that have a name."""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_shown(part) for part in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_shown(schema.get('items', {})) or 'anything'}"
    if "const" in schema or "enum" in schema:
        return ", ".join(html.escape(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    return html.escape(str(schema.get("type", "")))
