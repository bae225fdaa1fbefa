"""Bodies of /v1/conversations. Do not know where conversations are kept."""

from typing import Any

from pydantic import field_validator

from pagemill.serve.http.schemas.base import RequestBody
from pagemill.serve.http.schemas.response_items import Item, parse_items
from pagemill.serve.http.schemas.responses import parse_metadata

MAX_NEW_ITEMS = 20
"""In one request, as OpenAI has it."""


class _WithMetadata(RequestBody):
    metadata: Any = None

    @field_validator("metadata", mode="plain", json_schema_input_type=dict[str, str] | None)
    @classmethod
    def _metadata(cls, value: Any) -> dict[str, str]:
        return parse_metadata(value)


class ConversationBody(_WithMetadata):
    """A new conversation."""

    items: Any = None
    """After validation a list of items."""

    @field_validator("items", mode="plain", json_schema_input_type=list[dict[str, Any]] | None)
    @classmethod
    def _items(cls, value: Any) -> list[Item]:
        return [] if value is None or value == [] else parse_items(value, "items", MAX_NEW_ITEMS)


class ConversationUpdateBody(_WithMetadata):
    """What changes of a conversation."""


class NewItemsBody(RequestBody):
    """Items at the end of a conversation."""

    items: Any
    """After validation a list of items."""

    @field_validator("items", mode="plain", json_schema_input_type=list[dict[str, Any]])
    @classmethod
    def _items(cls, value: Any) -> list[Item]:
        return parse_items(value, "items", MAX_NEW_ITEMS)
