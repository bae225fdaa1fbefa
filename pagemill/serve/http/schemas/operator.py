"""Bodies of the operator's routes."""

from typing import Any

from pydantic import field_validator

from pagemill.errors import RequestError
from pagemill.serve.http.schemas.base import RequestBody
from pagemill.utils.text import shown

MAX_IDS = 1024


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
