"""Every error in one place, for all routes, as the object that clients of the route's API know.
Messages written for clients go out; anything unexpected is logged here and goes out without details."""

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.errors import (
    EngineDeadError,
    EngineOverloadedError,
    ModelNotFoundError,
    PagemillError,
    RequestError,
    UnavailableError,
)
from pagemill.log import get_logger
from pagemill.serve.http.client_limits import RateLimitedError
from pagemill.utils.log_text import stack_of
from pagemill.utils.text import shown

logger = get_logger(__name__)

MAX_MESSAGE_CHARS = 1000
OPENAI = "openai"
ANTHROPIC = "anthropic"
OLLAMA = "ollama"
_FORMS: Final = {"/api/": OLLAMA, "/v1/messages": ANTHROPIC}
"""What paths begin with -> the form of errors there, also where no route is. Elsewhere: OpenAI's."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> what clients of that API call the error."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_FILE_PATH = re.compile(r"(?<![\w./:])/(?:[\w.@+-]+/)+[\w.@+-]+")


class BodyTooLargeError(PagemillError):
    """The body of a request exceeds the limit."""


class GenerationFailedError(PagemillError):
    """The engine gave up one request through no fault of the client's, for a reason that may be known."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__("the engine could not complete this request" + (f": {reason}" if reason else ""))


class BusyError(PagemillError):
    """What was asked of the server cannot be done while requests run."""


class NotHereError(PagemillError):
    """A route that does nothing here, with the reason."""

    code = "not_supported"


class NotKeptError(NotHereError):
    """Nothing is stored under the id that a request names: not by this client, or not any more."""

    code = "not_found"


class UnauthorizedError(PagemillError):
    """The API key is missing or wrong."""


class ForbiddenError(PagemillError):
    """A request that a page of another site may have sent. `code` says what gave it away."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class UnsupportedTypeError(PagemillError):
    """The body of a request is not JSON, or packed."""


class ApiError(msgspec.Struct, frozen=True):
    """An error as clients see it."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = {}

    def body(self, form: str = OPENAI, request_id: str | None = None) -> bytes:
        """The JSON object, as one of the APIs writes it: a name of ERROR_FORMS."""
        return msgspec.json.encode(ERROR_FORMS[form](self, self.message[:MAX_MESSAGE_CHARS], request_id))

    def response(self, scope: Scope) -> Response:
        """As the answer to a request, in the form of the API that its path belongs to."""
        body = self.body(form_of_errors(scope["path"]), scope.get("request_id"))
        return Response(body, self.status, self.headers, "application/json")


def _openai(error: ApiError, message: str, request_id: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}


def _anthropic(error: ApiError, message: str, request_id: str | None) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status)
    kind = kind or ("invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _ollama(error: ApiError, message: str, request_id: str | None) -> dict[str, Any]:
    return {"error": message}


ERROR_FORMS: Final[dict[str, Callable[[ApiError, str, str | None], dict[str, Any]]]] = {
    OPENAI: _openai,
    ANTHROPIC: _anthropic,
    OLLAMA: _ollama,
}
"""API -> the object that tells its clients of an error."""


def form_of_errors(path: str) -> str:
    """The form in which clients of the API that a path belongs to know errors: a name of ERROR_FORMS."""
    return next((form for beginning, form in _FORMS.items() if path.startswith(beginning)), OPENAI)


def api_error(error: Exception) -> ApiError:
    """What a client is told about an exception."""
    known = _fault_of_client(error) or _fault_of_server(error)
    if known is None:
        logger.error("an unexpected error ended a request", exc_info=error)
        return ApiError(500, "the server failed on this request", "server_error", None, "internal_error")
    return known


def _fault_of_client(error: Exception) -> ApiError | None:
    match error:
        case ModelNotFoundError():
            return ApiError(404, str(error), "invalid_request_error", error.field, "model_not_found")
        case RequestError():
            return ApiError(400, _without_internals(str(error)), "invalid_request_error", error.field)
        case BusyError():
            return ApiError(409, str(error), "invalid_request_error", None, "busy")
        case NotHereError():
            return ApiError(404, str(error), "invalid_request_error", None, error.code)
        case UnauthorizedError():
            headers = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, str(error), "authentication_error", None, "invalid_api_key", headers)
        case ForbiddenError():
            return ApiError(403, str(error), "permission_error", None, error.code)
        case HTTPException():
            return _http_error(error)
    return _excess_of_client(error)


def _excess_of_client(error: Exception) -> ApiError | None:
    match error:
        case BodyTooLargeError():
            return ApiError(413, str(error), "invalid_request_error", None, "body_too_large")
        case UnsupportedTypeError():
            return ApiError(415, str(error), "invalid_request_error", None, "unsupported_media_type")
        case RateLimitedError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(429, str(error), "rate_limit_error", None, "rate_limit_exceeded", headers)
    return None


def _fault_of_server(error: Exception) -> ApiError | None:
    match error:
        case EngineOverloadedError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(503, str(error), "server_error", None, "engine_overloaded", headers)
        case UnavailableError():
            headers = {"Retry-After": "1", "Connection": "close"}
            return ApiError(503, _without_internals(str(error)), "server_error", None, "unavailable", headers)
        case EngineDeadError():
            return ApiError(503, "the engine is not running", "server_error", None, "engine_dead")
        case GenerationFailedError():
            return ApiError(500, _without_internals(str(error)), "server_error", None, "generation_failed")
    return None


def request_error(error: ValidationError) -> RequestError:
    """The first thing that is wrong with a body, as one line that names the field and, where all of it is wrong,
    its value. It has no traceback: the frames in which a validator raised it hold what they looked at."""
    problems = error.errors(include_url=False)
    first = problems[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause.with_traceback(None)
    if not first["loc"]:
        return RequestError(f"the body is not valid: {first['msg']}")
    field = str(first["loc"][0])
    # A field of several types fails once per type; all of them belong to the message.
    messages = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][:1] == first["loc"][:1])
    whole = len(first["loc"]) == 1 and first["type"] != "missing"
    wrong = f"{field}={shown(first['input'])} is not allowed" if whole else f"{field} is not valid"
    return RequestError(f"{wrong}: {'; '.join(list(messages)[:3])}", field)


class ErrorMiddleware:
    """Turns exceptions of everything inside it into responses, so that no route has to."""

    def __init__(self, app: ASGIApp, log_stacks: bool = False) -> None:
        """`log_stacks`: log where errors were raised that clients are told of."""
        self.app = app
        self._log_stacks = log_stacks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; answer when an exception comes back and nothing was sent yet."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except ClientDisconnect:
            logger.debug("a client went away while it sent its request")
        except Exception as error:
            if started:
                logger.exception("a response broke off")
                raise
            answer = api_error(error)
            if self._log_stacks:
                logger.error("request %s gets %d: %s", scope.get("request_id"), answer.status, stack_of(error))
            await answer.response(scope)(scope, receive, send)


def _http_error(error: HTTPException) -> ApiError:
    kind = "invalid_request_error" if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    known = {404: "there is no such route", 405: "this route does not take that method"}
    message = known.get(error.status_code) or HTTPStatus(error.status_code).phrase
    return ApiError(error.status_code, message, kind, None, None, dict(error.headers or {}))


def _without_internals(message: str) -> str:
    """Messages may quote what a template or a library said: no memory addresses, no file paths."""
    return _FILE_PATH.sub("<path>", _ADDRESS.sub("<address>", message))
