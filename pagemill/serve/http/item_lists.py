"""Lists of items as OpenAI's API gives them, page by page. Does not know where items are kept."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pagemill.errors import RequestError
from pagemill.utils.text import shown

MAX_PAGE = 100
_ORDERS = ("asc", "desc")


class Page(NamedTuple):
    """Which part of a list is asked for."""

    limit: int
    order: str
    after: str | None
    """The item before the first one; None: from the beginning."""

    @classmethod
    def of(cls, limit: str, order: str, after: str) -> "Page":
        """As a query asks for it. Raises RequestError."""
        if order not in _ORDERS:
            raise RequestError(f"order={shown(order)} is not one of {', '.join(_ORDERS)}", "order")
        return cls(number_of(limit, "limit", 1, MAX_PAGE), order, after or None)

    def cut(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The part of these, oldest first. Raises RequestError where there is no item to come after."""
        found = list(items) if self.order == "asc" else list(reversed(items))
        if self.after is not None:
            places = [place for place, item in enumerate(found) if item["id"] == self.after]
            if not places:
                raise RequestError(f"after={shown(self.after)} is not the id of an item of this list", "after")
            found = found[places[0] + 1 :]
        page = found[: self.limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(found) > len(page),
        }


def number_of(given: str, name: str, low: int, high: int) -> int:
    """A number of a query. Raises RequestError."""
    if not given.isascii() or not given.isdecimal() or len(given) > len(str(high)) or not low <= int(given) <= high:
        raise RequestError(f"{name}={shown(given)} is not allowed: a number from {low} to {high}", name)
    return int(given)
