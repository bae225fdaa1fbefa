"""Documents that a chat's answer may draw on, as requests give them: checked. Does not know templates."""

from collections.abc import Mapping
from typing import Any

from pagemill.errors import RequestError
from pagemill.utils.text import shown

MAX_DOCUMENTS = 1024


def parse_documents(value: Any) -> list[dict[str, Any]]:
    """Objects whose keys are the template's business: `title` and `text`, mostly. None is none. Raises RequestError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"documents={shown(value)} is not allowed: a list of objects", "documents")
    if len(value) > MAX_DOCUMENTS:
        raise RequestError(f"there are {len(value)} documents; at most {MAX_DOCUMENTS} are allowed", "documents")
    for index, document in enumerate(value):
        if not isinstance(document, Mapping) or not document:
            field = f"documents.{index}"
            raise RequestError(f"{field}={shown(document)} is not an object, such as of title and text", field)
    return value
