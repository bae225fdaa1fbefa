"""Certificates: used, replaced while the server runs, and wrong ones."""

import contextlib
import logging
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.serve.http import server
from pagemill.serve.http.server import bind_unix
from pagemill.serve.http.tls import Tls
from tests.fakes.certificates import ONE, TWO
from tests.fakes.engine import running_server, wait_until
from tests.fakes.fake_core import FakeCore
from tests.marks import slow

BODY = {"prompt": "ab", "max_tokens": 6}


@pytest.fixture(autouse=True)
def _looks_at_every_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """At handshakes that take too long, and whether there is a new certificate."""
    monkeypatch.setattr(server, "TICKS_PER_SWEEP", 1)


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


@pytest.mark.slow
def test_a_client_that_leaves_is_aborted(pem: Path) -> None:
    core = FakeCore(step_s=0.1)
    body = BODY | {"stream": True, "max_tokens": 200}
    trust = ssl.create_default_context(cafile=pem)
    with running_server(core, ssl_certfile=str(pem)) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, verify=trust, timeout=60) as answer:
            next(answer.iter_lines())
        wait_until(lambda: core.aborted, 60)


def dial(url: str) -> socket.socket:
    """A connection that says nothing yet."""
    host, port = url.removeprefix("https://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def is_hung_up(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_handshakes_that_are_not_finished_count_as_connections_and_give_way(pem: Path) -> None:
    trust = ssl.create_default_context(cafile=pem)
    with running_server(FakeCore(), ssl_certfile=str(pem), limit_concurrency=8) as url:
        silent = [dial(url) for _ in range(30)]
        silent[25].sendall(b"\x16\x03\x01\x00")  # the beginning of a handshake
        wait_until(lambda: sum(map(is_hung_up, silent)) == 22, 120)
        assert not is_hung_up(silent[-1]), "the oldest give way"
        assert httpx.get(f"{url}/health", verify=trust, timeout=60).status_code == 200
        for sock in silent:
            sock.close()


@pytest.mark.slow
def test_where_all_connections_are_at_work_a_handshake_is_hung_up(pem: Path) -> None:
    core = FakeCore(step_s=0.1)
    body = BODY | {"stream": True, "max_tokens": 200}
    trust = ssl.create_default_context(cafile=pem)
    with running_server(core, ssl_certfile=str(pem), limit_concurrency=1) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, verify=trust, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            with dial(url) as other:
                wait_until(lambda: is_hung_up(other), 120)
            assert next(line for line in lines if line), "it goes on"
        wait_until(lambda: core.aborted, 120)


@pytest.mark.parametrize("begin", [b"", slow(b"\x16\x03\x01\x02\x00\x01"), slow(b"GET / HTTP/1.1\r\n\r\n")])
def test_a_handshake_must_be_finished_in_time(pem: Path, begin: bytes) -> None:
    with running_server(FakeCore(), ssl_certfile=str(pem), timeout_request_head=0.2) as url, dial(url) as sock:
        sock.sendall(begin)
        wait_until(lambda: is_hung_up(sock), 120)


def test_a_request_may_come_with_the_end_of_the_handshake(pem: Path) -> None:
    """As the client's last message and the request may be in one packet."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    trust = ssl.create_default_context(cafile=pem)
    with running_server(FakeCore(), ssl_certfile=str(pem)) as url, dial(url) as sock:
        client = trust.wrap_bio(coming, going, server_hostname="127.0.0.1")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(going.read())
                coming.write(sock.recv(65536))
        client.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        sock.sendall(going.read())
        answer = b""
        while b"\r\n\r\n" not in answer:
            coming.write(sock.recv(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += client.read(65536)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_the_server_ends_while_handshakes_are_open(pem: Path) -> None:
    with running_server(FakeCore(), ssl_certfile=str(pem)) as url:
        silent = [dial(url) for _ in range(3)]
        wait_until(lambda: httpx.get(f"{url}/health", verify=False, timeout=60).status_code == 200)
    for sock in silent:
        wait_until(lambda sock=sock: is_hung_up(sock))  # type: ignore[misc]
        sock.close()


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
