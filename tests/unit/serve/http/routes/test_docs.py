"""/openapi.json and /docs."""

import re

from pagemill import __version__
from tests.unit.serve.http.conftest import Connect


async def test_the_document_is_of_this_server(connect: Connect) -> None:
    client = await connect()
    document = (await client.get("/openapi.json")).json()
    assert document["info"]["version"] == __version__
    assert "/v1/chat/completions" in document["paths"]
    assert "/pause" not in document["paths"], "the routes of operators are not mounted"
    assert "securitySchemes" not in document["components"]


async def test_the_page_loads_nothing(connect: Connect) -> None:
    client = await connect()
    page = await client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"<(script|link|img|iframe)|https?://|@import|url\(", page.text)
    for text in ("POST /v1/chat/completions", "temperature", "text/event-stream", "431"):
        assert text in page.text
    for anchor in set(re.findall(r'href="#([^"]+)"', page.text)):
        assert f'id="{anchor}"' in page.text


async def test_they_need_the_key(connect: Connect) -> None:
    client = await connect(api_key=("k",))
    for path in ("/openapi.json", "/docs"):
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers={"x-api-key": "k"})).status_code == 200
    document = (await client.get("/openapi.json", headers={"x-api-key": "k"})).json()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "key"}


async def test_they_may_be_left_out(connect: Connect) -> None:
    client = await connect(disable_fastapi_docs=True)
    for path in ("/openapi.json", "/docs"):
        assert (await client.get(path)).status_code == 404
