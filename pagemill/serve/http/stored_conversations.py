"""`StoredConversation`: items that a client has had stored, for responses to come. Does not know where it is kept."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pagemill.errors import RequestError
from pagemill.serve.http.client_store import ClientStore
from pagemill.serve.http.schemas.response_items import Item, new_id
from pagemill.serve.processing.conversation import MAX_MESSAGES

MAX_ITEMS: Final = MAX_MESSAGES
_PREFIXES: Final[Mapping[str, str]] = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_encode = msgspec.json.encode


class StoredConversation(msgspec.Struct, frozen=True):
    """Implements `Keepable`. Another one takes its place when anything of it changes."""

    id: str
    created_at: int
    metadata: dict[str, str]
    items: dict[str, bytes] = {}
    """Id -> JSON, oldest first."""

    @property
    def num_bytes(self) -> int:
        """See `Keepable`."""
        return sum(map(len, self.items.values())) + len(_encode(self.metadata))

    @property
    def in_progress(self) -> bool:
        """See `Keepable`."""
        return False

    async def close(self) -> None:
        """See `Keepable`: nothing is done for it."""

    @property
    def items_json(self) -> bytes:
        """The list of its items."""
        return b"[" + b",".join(self.items.values()) + b"]"

    def to_json(self) -> bytes:
        """As the API gives it, without its items."""
        fields = {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}
        return _encode(fields)

    def with_items(self, items: Sequence[Item]) -> "StoredConversation":
        """The conversation with these at its end; one whose id is taken gets another. Raises RequestError where they
        are too many."""
        if len(self.items) + len(items) > MAX_ITEMS:
            raise RequestError(f"a conversation has at most {MAX_ITEMS} items", "items")
        found = dict(self.items)
        for item in items:
            name = item["id"]
            if name in found:
                item = item | {"id": new_id(_PREFIXES.get(item["type"], "msg"))}
            found[item["id"]] = _encode(item)
        return msgspec.structs.replace(self, items=found)

    def without_item(self, name: str) -> "StoredConversation":
        """The conversation without the item of that id. Raises KeyError."""
        found = dict(self.items)
        del found[name]
        return msgspec.structs.replace(self, items=found)


def extend_conversation(
    store: ClientStore, owner: bytes, conversation: StoredConversation, items: Sequence[Item]
) -> StoredConversation:
    """Store a conversation with more items; what it has become. Raises RequestError, and it stays as it was, where
    there is no room for them."""
    extended = conversation.with_items(items)
    if store.put(owner, extended):
        return extended
    store.put(owner, conversation)
    raise RequestError(f"there is no room to store so much of the conversation {conversation.id!r}", "items")
