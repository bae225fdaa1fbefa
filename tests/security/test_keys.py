"""API keys on a real server: every route, every spelling, every key (CVE-2025-59425, CVE-2026-48746)."""

import hmac
from types import SimpleNamespace

import httpx
import pytest

from pagemill.cli.main import main
from pagemill.config.server_access import access_of, is_loopback
from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.fleet import serve
from pagemill.serve.http import auth
from tests.fakes.engine import make_app, make_engine, running_server
from tests.fakes.fake_core import FakeCore
from tests.security.raw import answer_to, connect, statuses
from tests.security.test_site_guard import routes

KEY = "correct-horse"
PUBLIC = {"/", "/static/{name}", "/health", "/health/live", "/health/ready", "/ping", "/metrics"}
"""Whoever adds a route without a key adds it here, and to docs/http-api.md."""
SPELLINGS = [
    *(
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/V1/models",
        "/./v1/models",
        "/v1/../metrics",
        "/metrics/../v1/models",
    ),
    *("/health/../v1/models", "/static/../v1/models", "/static/..%2fv1%2fmodels", "/health/%2e%2e/v1/models"),
    *("/metrics;/v1/models", "/metrics%00/v1/models", "http://x/v1/models", "http://x/metrics/../v1/models"),
    *(
        "http://x//v1/models",
        "http://metrics/v1/models",
        "http://x@metrics/v1/models",
        "/%76%31/models",
        "/v1%2fmodels",
    ),
    *("/v1/models?x=/health", "/v1/models#/health", "/version", "//version", "/%2fversion", "*", "\\\\v1\\\\models"),
    *("/lab", "/docs", "/openapi.json", "/redoc", "/nothing"),
]


def bearer(key):
    return {"authorization": b"Bearer " + key}


def status_with(url, key):
    return statuses(
        answer_to(
            url,
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer " + key + b"\r\n\r\n",
        )
    )


@pytest.fixture(scope="module")
def url():
    with running_server(FakeCore(), api_key=(KEY, "schlüssel", "a b")) as url:
        yield url


def test_every_route_but_the_public_ones_needs_a_key(url):
    """Also those that nobody has thought of: the check knows routes, not paths."""
    for method, path in routes():
        answer = httpx.request(method, url + path, verify=False)
        assert (answer.status_code != 401) is (path in PUBLIC and method in ("GET", "HEAD")), (method, path)
        assert httpx.request(method, url + path, headers=bearer(KEY.encode()), verify=False).status_code != 401
    mounted = make_app(make_engine()).router.routes
    assert {route.path for route in mounted if auth.is_public(route)} == PUBLIC


def test_metrics_may_need_it_too():
    with running_server(FakeCore(), api_key=(KEY,), protect_metrics=True) as url:
        for path in ("/metrics", "/metrics?x=1", "//metrics", "/metrics/"):
            for method in ("GET", "HEAD"):
                assert httpx.request(method, url + path).status_code == 401
        assert httpx.get(f"{url}/metrics", headers=bearer(KEY.encode())).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "TRACE"])
def test_no_spelling_of_a_path_passes(url, method):
    """Nor a header that proxies understand, nor another form of the target."""
    lines = "x-forwarded-path: /health\r\nx-original-url: /health\r\nx-rewrite-url: /health\r\nconnection: close\r\n"
    for path in SPELLINGS:
        request = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{lines}content-length: 0\r\n\r\n".encode()
        assert set(statuses(answer_to(url, request))) <= {401, 400}, path


@pytest.mark.parametrize("key", [KEY.encode(), "schlüssel".encode(), "schlüssel".encode("latin-1"), b"a b", b"  a b  "])
def test_keys(url, key):
    assert status_with(url, key) == [200]


@pytest.mark.parametrize(
    "key", [b"", b"correct", KEY.encode() + b"x", b"schl\xc3ssel", b"a", b"b", KEY.upper().encode()]
)
def test_no_keys(url, key):
    assert status_with(url, key) == [401]


def test_keys_are_compared_in_constant_time(monkeypatch):
    """All of them, whichever is right, and whatever is sent (CVE-2025-59425)."""
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    check = auth.AuthMiddleware(None, ("one", "two", "three"))
    for key, known in ((b"one", True), (b"three", True), (b"x", False), (b"t" * 10_000, False)):
        compared.clear()
        assert check._has_key({"headers": [(b"authorization", b"Bearer " + key)]}) is known
        assert compared == [(32, 32)] * 3


def test_the_body_of_a_stranger_is_not_read(url):
    """Nor waited for (CVE-2026-55646, an upload that is read before it is checked)."""
    with connect(url) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15000000\r\n\r\n")
        assert statuses(sock.recv(1000)) == [401]


@pytest.mark.parametrize("key", ["", " ", "k ", " k", "k\n", "a\x00b"])
def test_keys_that_nobody_can_send_are_found_at_start(key, monkeypatch):
    for keys in (key, (key,), ("good", key)):
        with pytest.raises(ConfigError, match="api_key") as raised:
            access_of(ServerConfig(api_key=keys))
        assert "good" not in str(raised.value)


def test_an_empty_key_of_the_environment_is_found_at_start(monkeypatch):
    monkeypatch.setenv("PAGEMILL_API_KEY", "")
    with pytest.raises(ConfigError, match="PAGEMILL_API_KEY is empty"):
        access_of(ServerConfig())


def test_several_keys_on_the_command_line(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(serve, "serve", lambda engine, server, fleet: given.append(server.api_key) or 0)
    assert main(["serve", "m", "--api-key", "a", "b", "--port", "1"]) == 0
    assert main(["serve", "m", "--api-key", "a", "--api-key", "b"]) == 0
    assert given == [("a", "b")] * 2
    assert main(["serve", "--api-key", "a", "smollm2"]) != 0
    assert "--model smollm2" in capsys.readouterr().err


def test_a_server_for_everybody_says_so(caplog, monkeypatch):
    monkeypatch.setattr(serve, "container", lambda: None)
    serve._with_keys(ServerConfig(host="0.0.0.0", api_key=("k",)))
    serve._with_keys(ServerConfig())
    assert not caplog.records
    serve._with_keys(ServerConfig(host="0.0.0.0"))
    assert "no --api-key" in caplog.text


def test_a_secret_of_several_machines_is_no_word(monkeypatch):
    plan = SimpleNamespace(head="10.0.0.1")
    monkeypatch.setenv("PAGEMILL_IPC_SECRET", "s" * 15)
    with pytest.raises(ConfigError, match="PAGEMILL_IPC_SECRET has 15 characters"):
        serve._shared_secret(plan)
    monkeypatch.setenv("PAGEMILL_IPC_SECRET", "s" * 16)
    assert serve._shared_secret(plan) == "s" * 16


def test_a_server_is_on_the_loopback_unless_it_is_told_otherwise():
    """Nothing is reached from a network by default (CVE-2025-32444, CVE-2025-47277)."""
    assert is_loopback(ServerConfig().host)
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example"))
