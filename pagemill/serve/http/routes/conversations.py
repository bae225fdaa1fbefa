"""/v1/conversations: items that are stored for responses to come, in OpenAI's form."""

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.errors import RequestError
from pagemill.serve.http.connection import read_small
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import NotKeptError
from pagemill.serve.http.item_lists import Page
from pagemill.serve.http.peers import StoredRoute
from pagemill.serve.http.preparer import AnswerForm
from pagemill.serve.http.responses import now
from pagemill.serve.http.routes.responses import json_answer, owner_of, store_of
from pagemill.serve.http.schemas.answers import (
    ConversationItem,
    ConversationObject,
    DeletedConversation,
    ItemList,
)
from pagemill.serve.http.schemas.base import RequestBody
from pagemill.serve.http.schemas.conversations import ConversationBody, ConversationUpdateBody, NewItemsBody
from pagemill.serve.http.state import services
from pagemill.serve.http.stored_conversations import StoredConversation, extend_conversation

router = APIRouter(route_class=StoredRoute)
MAX_BODY_BYTES = 1 << 20
"""Of items: they are parsed on the event loop."""
PATH = "/v1/conversations"
_encode = msgspec.json.encode


@router.post(PATH, response_model=None, openapi_extra=describes(ConversationObject, body=ConversationBody))
async def create_conversation(request: Request) -> Response:
    """Begin a conversation. Raises RequestError, NotHereError."""
    store = store_of(request)
    body = await read_small(request, ConversationBody, MAX_BODY_BYTES)
    new = StoredConversation(services(request).peers.new_id("conv"), now(), body.metadata or {}).with_items(
        body.items or []
    )
    if not store.put(owner_of(request), new):
        raise RequestError(f"there is no room to store {new.num_bytes} bytes", "items")
    return json_answer(new.to_json(), _headers(body))


@router.get(f"{PATH}/{{name}}", response_model=None, openapi_extra=describes(ConversationObject, statuses=(404,)))
async def get_conversation(request: Request, name: str) -> Response:
    """A conversation, without its items. Raises NotKeptError."""
    return json_answer(_found(request, name).to_json())


@router.post(
    f"{PATH}/{{name}}", response_model=None, openapi_extra=describes(ConversationObject, body=ConversationUpdateBody)
)
async def update_conversation(request: Request, name: str) -> Response:
    """Change what its client has noted about a conversation. Raises NotKeptError, RequestError."""
    found = _found(request, name)
    body = await read_small(request, ConversationUpdateBody)
    changed = msgspec.structs.replace(_found(request, name), metadata=body.metadata or {})
    if not store_of(request).put(owner_of(request), changed):
        store_of(request).put(owner_of(request), found)
        raise RequestError("there is no room to store so much", "metadata")
    return json_answer(changed.to_json(), _headers(body))


@router.delete(
    f"{PATH}/{{name}}", response_model=None, openapi_extra=describes(DeletedConversation, statuses=(404, 415))
)
async def delete_conversation(request: Request, name: str) -> Response:
    """Store a conversation no more. Raises NotKeptError."""
    await store_of(request).remove(owner_of(request), name, StoredConversation)
    return json_answer(_encode({"id": name, "object": "conversation.deleted", "deleted": True}))


@router.post(f"{PATH}/{{name}}/items", response_model=None, openapi_extra=describes(ItemList, body=NewItemsBody))
async def create_items(request: Request, name: str) -> Response:
    """Put items at the end of a conversation. Raises NotKeptError, RequestError."""
    _found(request, name)
    body = await read_small(request, NewItemsBody, MAX_BODY_BYTES)
    found = _found(request, name)  # it may have changed meanwhile
    extended = extend_conversation(store_of(request), owner_of(request), found, body.items)
    added = [msgspec.json.decode(item) for item in list(extended.items.values())[-len(body.items) :]]
    return json_answer(_encode(Page(len(added), "asc", None).cut(added)), _headers(body))


@router.get(f"{PATH}/{{name}}/items", response_model=None, openapi_extra=describes(ItemList, statuses=(404,)))
async def list_items(request: Request, name: str, limit: str = "20", order: str = "desc", after: str = "") -> Response:
    """The items of a conversation, a page of them. Raises NotKeptError, RequestError."""
    items = msgspec.json.decode(_found(request, name).items_json)
    return json_answer(_encode(Page.of(limit, order, after).cut(items)))


@router.get(
    f"{PATH}/{{name}}/items/{{item}}", response_model=None, openapi_extra=describes(ConversationItem, statuses=(404,))
)
async def get_item(request: Request, name: str, item: str) -> Response:
    """One item of a conversation. Raises NotKeptError."""
    found = _found(request, name).items.get(item)
    if found is None:
        raise _no_item(name, item)
    return json_answer(found)


@router.delete(
    f"{PATH}/{{name}}/items/{{item}}",
    response_model=None,
    openapi_extra=describes(ConversationObject, statuses=(404, 415)),
)
async def delete_item(request: Request, name: str, item: str) -> Response:
    """Take an item out of a conversation. Raises NotKeptError."""
    found = _found(request, name)
    if item not in found.items:
        raise _no_item(name, item)
    left = found.without_item(item)
    store_of(request).put(owner_of(request), left)
    return json_answer(left.to_json())


def _found(request: Request, name: str) -> StoredConversation:
    return store_of(request).get(owner_of(request), name, StoredConversation)


def _headers(body: RequestBody) -> dict[str, str]:
    return AnswerForm(ignored_fields=body.ignored_fields).headers()


def _no_item(name: str, item: str) -> NotKeptError:
    return NotKeptError(f"the conversation {name[:100]!r} has no item {item[:100]!r}")
