"""`describes`: what a route says of the bodies that it takes and gives, for /openapi.json. Does not know how the
document is written."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

JSON: Final = "application/json"
_NAME: Final = "x-described"


class Description(NamedTuple):
    """Of one route."""

    body: type[BaseModel] | None = None
    """Of the request; None: there is none."""
    answer: Any = None
    """Type of the body of the answer; None: it is empty."""
    event: Any = None
    """Type of what each event of a stream holds; None: the answer is never streamed."""
    media_type: str = JSON
    """Of an answer that is no stream."""
    stream_type: str = "text/event-stream"
    statuses: tuple[int, ...] = ()
    """That this route may answer with, besides 200 and those that any route may."""


def describes(
    answer: Any = None,
    *,
    body: type[BaseModel] | None = None,
    event: Any = None,
    media_type: str = JSON,
    stream_type: str = "text/event-stream",
    statuses: tuple[int, ...] = (),
) -> dict[str, Any]:
    """`openapi_extra` of a route, to be joined with what else it says of itself. See `Description`."""
    return {_NAME: Description(body, answer, event, media_type, stream_type, statuses)}


def description_of(extra: Mapping[str, Any] | None) -> Description | None:
    """What the `openapi_extra` of a route has to say; None: nothing."""
    found: Description | None = (extra or {}).get(_NAME)
    return found
