"""Which switches of the log go together."""

import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.config.server_logs import ServerLogs
from pagemill.errors import ConfigError


def test_by_default_nothing_is_logged_of_requests():
    logs = ServerLogs.of(ServerConfig())
    assert not (logs.answered or logs.requests or logs.outputs or logs.deltas or logs.error_stacks)


@pytest.mark.parametrize(("level", "off", "on"), [
    ("debug", False, True), ("info", False, True), ("info", True, False), ("warning", False, False),
])  # fmt: skip
def test_the_access_log(level, off, on):
    config = ServerConfig(uvicorn_log_level=level, disable_uvicorn_access_log=off)
    assert ServerLogs.of(config).answered is on


def test_paths():
    config = ServerConfig(disable_access_log_for_endpoints="/health, /metrics")
    assert ServerLogs.of(config).silent_paths == {"/health", "/metrics"}


@pytest.mark.parametrize(("settings", "named"), [
    ({"disable_access_log_for_endpoints": "health"}, "disable_access_log_for_endpoints='health'"),
    ({"disable_access_log_for_endpoints": "/a,,/b"}, "disable_access_log_for_endpoints"),
    ({"disable_access_log_for_endpoints": ""}, "disable_access_log_for_endpoints"),
    ({"enable_log_outputs": True}, "enable_log_outputs needs enable_log_requests"),
    ({"enable_log_requests": True, "enable_log_deltas": True}, "enable_log_deltas needs enable_log_outputs"),
])  # fmt: skip
def test_what_contradicts_itself(settings, named):
    with pytest.raises(ConfigError, match=named):
        ServerLogs.of(ServerConfig(**settings))
