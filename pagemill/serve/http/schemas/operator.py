"""Bodies of the operator's routes."""

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from pagemill.errors import RequestError
from pagemill.serve.http.schemas.base import RequestBody
from pagemill.utils.text import shown

MAX_IDS = 1024
CALLS = ("describe",)
"""Methods of workers that need no argument and change nothing."""


class AbortBody(RequestBody):
    """Requests that are to be ended."""

    request_ids: Any
    """After validation a list of texts."""

    @field_validator("request_ids", mode="plain", json_schema_input_type=list[str])
    @classmethod
    def _ids(cls, value: Any) -> list[str]:
        if isinstance(value, list) and value and len(value) <= MAX_IDS and set(map(type, value)) == {str}:
            return value
        raise RequestError(
            f"request_ids={shown(value)} is not allowed: a list of 1 to {MAX_IDS} ids of answers", "request_ids"
        )


class CallBody(RequestBody):
    """A method of the workers that is to be called."""

    method: Any
    """After validation a name of `CALLS`."""
    args: Any = ()
    kwargs: Any = None
    timeout: Any = None

    @field_validator("method", mode="plain", json_schema_input_type=Literal["describe"])
    @classmethod
    def _method(cls, value: Any) -> str:
        if isinstance(value, str) and value in CALLS:
            return value
        raise RequestError(
            f"method={shown(value)} is not one of {', '.join(CALLS)}; a profile has routes of its own", "method"
        )

    @field_validator("args", "kwargs", "timeout", mode="plain", json_schema_input_type=list[str] | None)
    @classmethod
    def _nothing(cls, value: Any, info: ValidationInfo) -> Any:
        if value:
            raise RequestError(f"{info.field_name} is not supported: these methods take none", info.field_name)
        return value
