"""The playground: a page that talks to this server's own API. Serves files of the package; knows no model.

The page must load without a key, so that it can ask for one; the API that it calls is guarded as for everyone.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response

from pagemill.serve.http.auth import PUBLIC

router = APIRouter(include_in_schema=False)

FOLDER: Final = Path(__file__).resolve().parent.parent / "static"
PAGE: Final = "index.html"
CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""no-cache: keep a copy, but ask whether it is current, so that an upgrade shows at once."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    content_type: str
    etag: str


@router.api_route("/", methods=["GET", "HEAD"], openapi_extra=PUBLIC)
async def page(request: Request) -> Response:
    """The page itself."""
    return _answer(request, _files()[PAGE])


@router.api_route("/static/{name}", methods=["GET", "HEAD"], openapi_extra=PUBLIC)
async def static_file(request: Request, name: str) -> Response:
    """What the page is made of; only names that are in the package are looked at."""
    file = _files().get(name)
    if file is None:
        raise HTTPException(404, f"no such file: {name}")
    return _answer(request, file)


def _answer(request: Request, file: _File) -> Response:
    headers = HEADERS | {"etag": file.etag}
    if file.etag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.content_type, headers=headers)


@cache
def _files() -> dict[str, _File]:
    """Every file of the folder that has a known type, read once."""
    found = (path for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES)
    return {path.name: _read(path) for path in found}


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, CONTENT_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
