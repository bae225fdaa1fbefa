"""Pages of other sites cannot use a server on the loopback that has no key; and browsers may read what is allowed."""

import httpx
import pytest
from starlette.routing import Route

from pagemill.config.server_access import access_of
from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.serve.http.routes.absent import ABSENT
from tests.fakes.engine import make_app, make_engine, running_server
from tests.fakes.fake_core import FakeCore
from tests.security.raw import answer_to, statuses

BODY = {"prompt": "a", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "input": "a"}
HERE = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "[::1]:8000",
    "localhost",
    "LOCALHOST:1",
    "app.localhost",
    "gpu-box",
    "10.0.0.1",
    "x.internal",
]
ELSEWHERE = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example.",
    "a.b",
]

ANY_TYPE = {"/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", *ABSENT}
"""Bodies may be of any type there, from what is no browser: Ollama's own examples send a form's, and where nothing is
done with a body the reason is told."""


def routes():
    """(method, path) of every route there is."""
    found = [route for route in make_app(make_engine()).router.routes if isinstance(route, Route)]
    return [(method, route.path.replace("{name:path}", "x")) for route in found for method in sorted(route.methods)]


def ask(url, method="POST", path="/v1/completions", **headers):
    """A request with exactly these headers beside those of the body."""
    content = httpx.Request("POST", url, json=BODY).content if method == "POST" else None
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, url + path, content=content, headers=named, verify=False)


@pytest.fixture(scope="module")
def url():
    with running_server(FakeCore()) as url:
        yield url


def test_names_of_other_sites_are_refused_on_every_route(url):
    """DNS rebinding: the page's own name leads here."""
    assert {("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics")} <= set(routes())
    for method, path in routes():
        answer = ask(url, method, path, host="evil.example", content_type="application/json")
        assert answer.status_code == 403, (method, path)
        if method != "HEAD" and not path.startswith(("/v1/messages", "/api/")):  # errors have another form there
            assert answer.json()["error"]["code"] == "host_not_allowed"


def test_pages_of_other_sites_are_refused_on_every_route(url):
    for method, path in routes():
        for origin in ("https://evil.example", "http://localhost:3000", "null", "file://"):
            answer = ask(url, method, path, origin=origin, content_type="application/json")
            assert answer.status_code == 403, (method, path, origin)


def test_bodies_that_a_form_can_send_are_refused_on_every_route(url):
    types = [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/jsonx",
    ]
    for method, path in routes():
        if method == "POST":
            for kind in types:
                if path in ANY_TYPE:
                    assert ask(url, method, path, content_type=kind).status_code != 415
                    answer = ask(url, method, path, content_type=kind, origin="http://127.0.0.1")
                    assert answer.status_code in (403, 415), (path, kind)
                    assert ask(url, method, path, content_type=kind, sec_fetch_site="same-origin").status_code == 415
                    continue
                answer = ask(url, method, path, content_type=kind)
                assert answer.status_code == 415, (path, kind)
                if not path.startswith(("/v1/messages", "/api/")):
                    assert answer.json()["error"]["code"] == "unsupported_media_type"
            assert ask(url, method, path, sec_fetch_site="cross-site").status_code == 415


def test_packed_bodies_are_refused_on_every_route(url):
    for method, path in routes():
        if method == "POST":
            for coding in ("gzip", "deflate", "br", "identity, zstd"):
                answer = ask(url, method, path, content_type="application/json", content_encoding=coding)
                assert answer.status_code == 415, (path, coding)
                assert "content-encoding" in answer.text
    assert ask(url, content_type="application/json", content_encoding="identity").status_code == 200
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\nconnection: close\r\n\r\n"
    assert statuses(answer_to(url, head.encode() + b"2\r\n{}\r\n0\r\n\r\n")) == [415]


@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine(url, host):
    assert ask(url, host=host, content_type="application/json").status_code == 200
    assert (
        ask(url, host=host, content_type="Application/JSON; charset=utf-8", origin=f"http://{host}").status_code == 200
    )
    assert ask(url, host=host).status_code == 200, "clients that are no browsers may leave the type out"


@pytest.mark.parametrize("host", ELSEWHERE)
def test_names_of_others(url, host):
    assert ask(url, host=host).status_code == 403
    assert ask(url, "GET", "/health", host=host).status_code == 403


def test_a_second_host_header_does_not_help(url):
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
    assert statuses(answer_to(url, request)) == [400]


def test_a_proxy_on_this_machine():
    with running_server(FakeCore(), allowed_hosts="chat.example, other.example") as url:
        assert ask(url, host="chat.example").status_code == 200
        for host in ("CHAT.example:443", "127.0.0.1:8000"):
            answer = ask(url, host=host, origin="https://chat.example", content_type="application/json")
            assert answer.status_code == 200
        assert ask(url, host="localhost").status_code == 200
        assert ask(url, host="evil.example").status_code == 403
        assert ask(url, host="chat.example", origin="https://evil.example").status_code == 403
    with running_server(FakeCore(), allowed_hosts='["*"]') as url:
        assert ask(url, host="evil.example").status_code == 200


def test_with_a_key_or_for_the_network_names_are_not_asked():
    """Pages of others have no key; and the names of a machine on a network are not known here."""
    with running_server(FakeCore(), api_key=("k",)) as url:
        assert ask(url, host="gpu.example", origin="https://chat.example").status_code == 401
        answer = ask(
            url,
            host="gpu.example",
            origin="https://a.example",
            authorization="Bearer k",
            content_type="application/json",
        )
        assert answer.status_code == 200
    assert access_of(ServerConfig(host="0.0.0.0")).hosts is None
    assert access_of(ServerConfig(host="::1")).hosts == ()
    assert access_of(ServerConfig(host="0.0.0.0", allowed_hosts="a.example")).hosts == ("a.example",)


@pytest.mark.parametrize(
    "given", ["https://chat.example,http://b.example:8", '["https://Chat.example", "http://b.example:8"]']
)
def test_origins_are_exact(given):
    with running_server(FakeCore(), allowed_origins=given) as url:
        good = ask(url, origin="https://chat.example", content_type="application/json")
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://chat.example"
        for origin in (
            "https://chat.example.evil",
            "http://chat.example",
            "https://chat.example:8",
            "null",
            "https://evil",
        ):
            answer = ask(url, origin=origin, content_type="application/json")
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
            asked = {"origin": origin, "access-control-request-method": "POST"}
            assert "access-control-allow-origin" not in httpx.options(f"{url}/v1/completions", headers=asked).headers


@pytest.mark.parametrize("given", ["*", '["*"]'])
def test_all_origins(given):
    with running_server(FakeCore(), allowed_origins=given) as url:
        answer = ask(url, origin="https://chat.example", content_type="application/json")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(("setting", "value"), [
    ("allowed_origins", ""), ("allowed_origins", "chat.example"), ("allowed_origins", "https://chat.example/"),
    ("allowed_origins", '["https://a'), ("allowed_origins", "[]"), ("allowed_origins", "[5]"),
    ("allowed_origins", "null"), ("allowed_hosts", ""), ("allowed_hosts", "https://chat.example"),
    ("allowed_hosts", "a b"), ("allowed_hosts", "a:80"), ("allowed_hosts", "*.chat.example"),
    ("allowed_hosts", "chat.example."), ("allowed_origins", "https://*.chat.example"),
])  # fmt: skip
def test_what_is_no_origin_or_host_is_found_at_start(setting, value):
    with pytest.raises(ConfigError, match=setting):
        access_of(ServerConfig(**{setting: value}))
