"""What a server checks and says before it starts anything."""

import logging

import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.fleet import serve


@pytest.mark.parametrize(("host", "runtime", "said"), [
    ("127.0.0.1", "docker", "NOBODY OUTSIDE THIS CONTAINER (docker) CAN CONNECT: it listens on 127.0.0.1"),
    ("localhost", "podman", "NOBODY OUTSIDE THIS CONTAINER (podman) CAN CONNECT: it listens on localhost"),
    ("127.0.0.1", None, None),
    ("0.0.0.0", "docker", None),
])  # fmt: skip
def test_a_loopback_address_in_a_container(
    host: str, runtime: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "container", lambda: runtime)
    with caplog.at_level(logging.WARNING, "pagemill"):
        server = serve._with_keys(ServerConfig(host=host, api_key=("key",)))
    assert server.api_key == ("key",)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == ([said] if said else [])
