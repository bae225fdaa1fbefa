"""The exception tree. Nothing here knows which plane raises it.

PagemillError
├── ConfigError          a setting, or two settings together, cannot work; names them and the remedy
├── ModelError           the files of a model are missing, damaged or of an unsupported architecture
├── RequestError         one request is at fault; names the field, the value and what is allowed
│   └── ModelNotFoundError   the request names a model that this server does not serve
├── DistributedError     the ranks of an engine did not meet, or one of them is gone
├── EngineOverloadedError    the engine refuses new requests for now
├── UnavailableError     no new request is served: the server is shutting down
├── EngineDeadError      the engine core is gone; no request can be served
├── PeerGoneError        the process at the other end of a queue or socket is gone
└── TransportError       bytes from another process are not a message; receivers log and drop them
    └── HandshakeError       a connecting process is of another version, secret or role
        └── NoAnswerError        there was no answer in time: it may be too early
"""


class PagemillError(Exception):
    """Root of every error raised on purpose by pagemill."""


class ConfigError(PagemillError, ValueError):
    """A setting cannot work. The message names the setting, its value and what is allowed."""


class ModelError(PagemillError, ValueError):
    """The files of a model are missing, damaged, or of an unsupported architecture."""


class RequestError(PagemillError, ValueError):
    """One request is at fault. Raised in `serve` only, before the engine sees the request.

    `field` is the request field at fault (None when the body as a whole is), for the API error object.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class DistributedError(PagemillError):
    """Ranks that compute together did not meet, or one of them is gone."""


class EngineOverloadedError(PagemillError):
    """The engine takes no further request now; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(PagemillError):
    """New requests are not served any more, or not yet; those that run go on."""


class EngineDeadError(PagemillError):
    """The engine core stopped; requests in flight were not completed."""


class PeerGoneError(PagemillError):
    """The process at the other end of a queue or socket is gone, or takes nothing any more."""


class TransportError(PagemillError, ValueError):
    """Bytes from another process are not a message: malformed, truncated or oversized. Receivers log and drop them."""


class HandshakeError(TransportError):
    """Two processes do not belong together: another protocol version, another secret, or a role not accepted."""


class NoAnswerError(HandshakeError):
    """Nobody answered in time; another attempt may succeed."""


class NotLetInError(NoAnswerError):
    """Somebody listens, and lets nobody in who has this process's secret, or is too busy to answer."""


def start_error(kind: str) -> type[PagemillError]:
    """The class of error to raise where a process reports that an error of class `kind` keeps it from starting:
    ConfigError and ModelError, which the user can mend, are themselves, and anything else is an EngineDeadError."""
    return {"ConfigError": ConfigError, "ModelError": ModelError}.get(kind, EngineDeadError)
