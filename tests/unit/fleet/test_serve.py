"""What a server checks and says before it starts anything."""

import logging

import pytest

from pagemill.config.sections import FleetConfig
from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
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


def test_what_is_stored_needs_one_api_server() -> None:
    store = ServerConfig(response_store_bytes=1 << 20)
    serve._check_store(store, FleetConfig())
    serve._check_store(store, FleetConfig(data_parallel_size=2, api_server_count=1))
    serve._check_store(ServerConfig(), FleetConfig(api_server_count=2))
    for fleet in (FleetConfig(api_server_count=2), FleetConfig(data_parallel_size=2)):
        with pytest.raises(ConfigError, match=r"response_store_bytes=1048576.*--api-server-count 1"):
            serve._check_store(store, fleet)
