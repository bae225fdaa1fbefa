"""Certificates: used, replaced while the server runs, and wrong ones."""

import logging
import ssl
from pathlib import Path

import httpx
import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.serve.http.server import bind_unix
from pagemill.serve.http.tls import Tls
from tests.fakes.certificates import ONE, TWO
from tests.fakes.engine import running_server, wait_until
from tests.fakes.fake_core import FakeCore

BODY = {"prompt": "ab", "max_tokens": 6}


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    path = tmp_path / "server.pem"
    path.write_text(ONE)
    return path


def shown(url: str) -> str:
    """The certificate that a server shows."""
    host, port = url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port)), timeout=60)


def replace(pem: Path, content: str) -> None:
    new = pem.with_suffix(".new")
    new.write_text(content)
    new.replace(pem)


def test_answers_whole_and_streamed(pem: Path) -> None:
    trust = ssl.create_default_context(cafile=pem)
    with (
        running_server(FakeCore(), ssl_certfile=str(pem)) as url,
        httpx.Client(base_url=url, verify=trust, timeout=60) as client,
    ):
        assert url.startswith("https://")
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "ababab"
        streamed = client.post("/v1/completions", json=BODY | {"stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"), timeout=60)


def test_a_client_that_leaves_is_aborted(pem: Path) -> None:
    core = FakeCore(step_s=0.1)
    body = BODY | {"stream": True, "max_tokens": 200}
    trust = ssl.create_default_context(cafile=pem)
    with running_server(core, ssl_certfile=str(pem)) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, verify=trust, timeout=60) as answer:
            next(answer.iter_lines())
        wait_until(lambda: core.aborted, 60)


def test_a_new_certificate_is_used_by_new_connections(pem: Path) -> None:
    with running_server(FakeCore(), ssl_certfile=str(pem), enable_ssl_refresh=True) as url:
        assert shown(url).strip() in ONE
        replace(pem, TWO)
        wait_until(lambda: shown(url).strip() in TWO, 60)


def test_what_cannot_be_used_leaves_it_as_it_is(pem: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls = Tls(ServerConfig(ssl_certfile=str(pem), enable_ssl_refresh=True))
    caplog.set_level(logging.INFO)
    replace(pem, "nothing")
    tls.refresh()
    tls.refresh()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    replace(pem, TWO)
    tls.refresh()
    assert caplog.records[-1].getMessage() == "the certificate was loaded again"


def test_it_is_not_followed_unless_that_is_asked_for(pem: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls = Tls(ServerConfig(ssl_certfile=str(pem)))
    replace(pem, "nothing")
    tls.refresh()
    assert not caplog.records


def test_clients_may_need_a_certificate(pem: Path) -> None:
    trust = ssl.create_default_context(cafile=pem)
    with running_server(FakeCore(), ssl_certfile=str(pem), ssl_cert_reqs=2, ssl_ca_certs=str(pem)) as url:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/health", verify=trust, timeout=60)
        trust.load_cert_chain(pem)
        assert httpx.get(f"{url}/health", verify=trust, timeout=60).status_code == 200


@pytest.mark.parametrize("settings", [
    {"ssl_certfile": "/nowhere/x.pem"}, {"ssl_keyfile": "x.key"}, {"ssl_cert_reqs": 2}, {"enable_ssl_refresh": True},
    {"ssl_certfile": "PEM", "ssl_cert_reqs": 5}, {"ssl_certfile": "PEM", "ssl_ciphers": "nothing"},
    {"ssl_certfile": "PEM", "ssl_ca_certs": "/nowhere/ca.pem"},
])  # fmt: skip
def test_what_cannot_work_is_found_at_start(pem: Path, settings: dict[str, object]) -> None:
    given = {name: str(pem) if value == "PEM" else value for name, value in settings.items()}
    with pytest.raises(ConfigError, match="ssl_"):
        Tls.of(ServerConfig(**given))  # type: ignore[arg-type]


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with running_server(FakeCore(), uds=path) as url:
        assert url == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "ababab"
            assert client.get("/health").status_code == 200
        with pytest.raises(ConfigError, match="is in use"):
            bind_unix(path)
    with bind_unix(path):  # what the first has left is replaced
        assert Path(path).is_socket()
    with pytest.raises(ConfigError, match="cannot be listened on"):
        bind_unix("/nowhere/s")
