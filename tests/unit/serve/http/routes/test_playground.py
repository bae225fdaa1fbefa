import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from pagemill.catalog.endpoints import ENDPOINTS
from pagemill.serve.http.routes.playground import FOLDER, router


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def test_the_catalogue_knows_the_router():
    assert ENDPOINTS.resolve("playground") is router


async def test_the_page_and_everything_it_refers_to(client: httpx.AsyncClient):
    page = await client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    seen, names = set(), set(re.findall(r'(?:src|href)="static/([^"]+)"', page.text))
    while names - seen:
        name = (names - seen).pop()
        seen.add(name)
        file = await client.get(f"/static/{name}")
        assert file.status_code == 200, name
        names |= set(re.findall(r'from "\./([^"]+)"', file.text))
    assert seen == {path.name for path in FOLDER.iterdir()} - {"index.html"}, "every file is used, and exists"


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("app.js", "text/javascript; charset=utf-8"),
        ("style.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
async def test_content_types(client: httpx.AsyncClient, name: str, content_type: str):
    answer = await client.get(f"/static/{name}")
    assert answer.headers["content-type"] == content_type
    assert answer.content == (FOLDER / name).read_bytes()


async def test_every_answer_is_guarded(client: httpx.AsyncClient):
    for path in ("/", "/static/app.js"):
        headers = (await client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_needs_nothing_inline_and_nothing_from_elsewhere():
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(src|href|url|import|fetch)\W{1,3}(https?:)?//", text), path.name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, path.name


async def test_a_current_copy_is_not_sent_again(client: httpx.AsyncClient):
    first = await client.get("/static/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get("/static/app.js", headers={"if-none-match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert (await client.get("/static/app.js", headers={"if-none-match": '"other"'})).status_code == 200


async def test_head_has_no_body(client: httpx.AsyncClient):
    answer = await client.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("name", ["no-such.js", "..%2froutes%2fplayground.py", "%2e%2e/__init__.py", ""])
async def test_nothing_else_can_be_read(client: httpx.AsyncClient, name: str):
    assert (await client.get(f"/static/{name}")).status_code == 404
