"""`ServerLogs`: what a server writes down of its requests, from the settings as they are given. Does not know how."""

from dataclasses import dataclass

from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError

_ACCESS_LEVELS = ("debug", "info")
"""Log levels of the HTTP server at which it names what it has answered."""


@dataclass(frozen=True)
class ServerLogs:
    """Which lines a server logs of the requests that it gets and the answers that it gives."""

    answered: bool = False
    """A line for each answer: the access log."""
    silent_paths: frozenset[str] = frozenset()
    """Paths that have no such line."""
    requests: bool = False
    """A line for each request for the model."""
    outputs: bool = False
    """What was generated, when it has ended."""
    deltas: bool = False
    """Every part of it that is streamed."""
    max_chars: int = 0
    """Of a prompt or an answer in one line."""
    error_stacks: bool = False
    """Where an error was raised that a client was told of."""

    @classmethod
    def of(cls, config: ServerConfig) -> "ServerLogs":
        """Which lines the settings of a server ask for. Raises ConfigError for settings that contradict each other, and
        for paths that are none."""
        if config.enable_log_outputs and not config.enable_log_requests:
            raise ConfigError("enable_log_outputs needs enable_log_requests")
        if config.enable_log_deltas and not config.enable_log_outputs:
            raise ConfigError("enable_log_deltas needs enable_log_outputs")
        return cls(
            answered=config.uvicorn_log_level in _ACCESS_LEVELS and not config.disable_uvicorn_access_log,
            silent_paths=_paths(config.disable_access_log_for_endpoints),
            requests=config.enable_log_requests,
            outputs=config.enable_log_outputs,
            deltas=config.enable_log_deltas,
            max_chars=config.max_log_len,
            error_stacks=config.log_error_stack,
        )


def _paths(given: str | None) -> frozenset[str]:
    """Of a list separated by commas."""
    paths = [] if given is None else [path.strip() for path in given.split(",")]
    for path in paths:
        if not path.startswith("/"):
            raise ConfigError(
                f"disable_access_log_for_endpoints={given!r} is not allowed: paths separated by commas, such as "
                "/health,/metrics"
            )
    return frozenset(paths)
