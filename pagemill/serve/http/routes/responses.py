"""/v1/responses: OpenAI's Responses API."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.errors import RequestError
from pagemill.serve.http.client_store import ClientStore
from pagemill.serve.http.connection import EventStream, KeepAlive, read_body
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import NotHereError, NotKeptError
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.intake import PreparedBody
from pagemill.serve.http.item_lists import Page, number_of
from pagemill.serve.http.peers import StoredRoute
from pagemill.serve.http.preparer import CONTINUED_RESPONSES, RESPONSES
from pagemill.serve.http.response_deltas import COMPLETED, FAILED, INCOMPLETE, QUEUED, ResponseDeltas
from pagemill.serve.http.responses import ResponseHead, Usage, now
from pagemill.serve.http.schemas.answers import DeletedResponse, ItemList, ResponseEvent, ResponseObject
from pagemill.serve.http.schemas.responses import ResponseForm, ResponsesBody, conversation_id
from pagemill.serve.http.state import Services, services
from pagemill.serve.http.stored_conversations import StoredConversation, extend_conversation
from pagemill.serve.http.stored_responses import NO_ROOM, StoredResponse, joined

router = APIRouter(route_class=StoredRoute)
NO_STORE = "this server stores nothing: start it with --response-store-bytes"
MAX_EVENTS = 2**31 - 1
_TRUE = ("true", "1", "True")
_encode = msgspec.json.encode


class _Peek(msgspec.Struct):
    """What must be known of a body before it is prepared."""

    previous_response_id: str | None = None
    conversation: Any = None


class _Follows(NamedTuple):
    """What a body goes on with."""

    name: str | None = None
    """The id of something that is stored; None: nothing."""
    is_conversation: bool = False


NOTHING_BEFORE = _Follows()


class _Started(NamedTuple):
    """A body that passed every check, and what came before its items."""

    body: PreparedBody
    form: ResponseForm
    before: bytes


@router.post(
    "/v1/responses",
    response_model=None,
    openapi_extra=describes(ResponseObject, body=ResponsesBody, event=ResponseEvent),
)
async def create_response(request: Request) -> Response:
    """Answer items. Everything is checked before anything runs.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    raw = await read_body(request)
    follows = _followed_by(raw) if here.kept is not None else NOTHING_BEFORE
    if here.peers.are_asked(request.scope, follows.name):
        return await here.peers.ask(request, follows.name, raw)
    started = await _prepared(here, request, raw, follows)
    store = _store_for(here, started.form)
    head = ResponseHead(here.peers.new_id("resp"), here.model.name, now())
    deltas = _deltas(here, started, head, is_stored=store is not None)
    generation = Generation(here.engine, started.body.requests, deltas)
    owner = owner_of(request)
    extend = _extension(here, owner, started.form)
    if store is None:
        deltas.keep = extend
        return await answer(request, started.body.form, generation)
    streams = started.body.form.stream
    stored = StoredResponse(
        head.id,
        joined(started.before, started.form.items),
        _encode(deltas.answer(QUEUED)),
        QUEUED,
        with_events=started.form.background and streams,
    )
    deltas.keep = lambda ended: _keep(store, owner, stored, extend(ended))
    if not started.form.background:
        return await answer(request, started.body.form, generation)
    store.put_new(owner, stored)
    generation.belongs_to(request)
    stored.start(generation, deltas, functools.partial(_has_room, store, owner, stored))
    headers = started.body.form.headers()
    if streams:
        return _followed(here, stored, 0, headers)
    return json_answer(stored.answer, headers)


@router.get(
    "/v1/responses/{name}",
    response_model=None,
    openapi_extra=describes(ResponseObject, event=ResponseEvent, statuses=(404,)),
)
async def get_response(request: Request, name: str, stream: str = "false", starting_after: str = "") -> Response:
    """A stored answer, as it is now, or its events from one on. Raises NotKeptError, RequestError."""
    stored = store_of(request).get(owner_of(request), name, StoredResponse)
    if stream not in _TRUE:
        return json_answer(stored.answer)
    if not stored.has_events:
        raise RequestError(
            "stream=true is for responses that were created with background=true and stream=true", "stream"
        )
    after = number_of(starting_after, "starting_after", 0, MAX_EVENTS) if starting_after else -1
    return _followed(services(request), stored, after + 1)


@router.delete(
    "/v1/responses/{name}", response_model=None, openapi_extra=describes(DeletedResponse, statuses=(404, 415))
)
async def delete_response(request: Request, name: str) -> Response:
    """Store an answer no more; one that is being generated is aborted. Raises NotKeptError."""
    await store_of(request).remove(owner_of(request), name, StoredResponse)
    return json_answer(_encode({"id": name, "object": "response", "deleted": True}))


@router.post(
    "/v1/responses/{name}/cancel", response_model=None, openapi_extra=describes(ResponseObject, statuses=(404, 415))
)
async def cancel_response(request: Request, name: str) -> Response:
    """End the work for an answer that is generated in the background; the answer. Raises NotKeptError, RequestError."""
    stored = store_of(request).get(owner_of(request), name, StoredResponse)
    if not stored.is_background:
        raise RequestError("only a response that was created with background=true can be cancelled", "response_id")
    await stored.cancel()
    return json_answer(stored.answer)


@router.get("/v1/responses/{name}/input_items", response_model=None, openapi_extra=describes(ItemList, statuses=(404,)))
async def list_input_items(
    request: Request, name: str, limit: str = "20", order: str = "desc", after: str = ""
) -> Response:
    """What an answer was made of, a page of it. Raises NotKeptError, RequestError."""
    stored = store_of(request).get(owner_of(request), name, StoredResponse)
    return json_answer(_encode(Page.of(limit, order, after).cut(msgspec.json.decode(stored.items))))


def owner_of(request: Request) -> bytes:
    """Whose things a request may see: those of its key."""
    key: bytes = request.scope.get("api_key", b"")
    return key


def store_of(request: Request) -> ClientStore:
    """What clients have had stored. Raises NotHereError where nothing is."""
    store = services(request).kept
    if store is None:
        raise NotHereError(NO_STORE)
    return store


async def _prepared(here: Services, request: Request, raw: bytes, follows: _Follows) -> _Started:
    """What came before is looked up first, because it is part of the prompt."""
    before = _before(request, follows)
    if before:
        body = await here.intake.prepare_read(CONTINUED_RESPONSES, b'{"before":%b,"body":%b}' % (before, raw), request)
    else:
        body = await here.intake.prepare_read(RESPONSES, raw, request)
    if body.form.response is None:
        raise TypeError("a body of another kind")
    return _Started(body, body.form.response, before or b"[]")


def _followed_by(raw: bytes) -> _Follows:
    """What a body goes on with; nothing, where it cannot be read. Raises RequestError."""
    try:
        peek = msgspec.json.decode(raw, type=_Peek)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return NOTHING_BEFORE  # those who read it say what is wrong
    if peek.conversation is None:
        return _Follows(peek.previous_response_id)
    if peek.previous_response_id is not None:
        raise RequestError("previous_response_id is not allowed with conversation", "previous_response_id")
    return _Follows(conversation_id(peek.conversation), is_conversation=True)


def _before(request: Request, follows: _Follows) -> bytes:
    """JSON of the items that a body follows; b"" where it follows none. Raises RequestError."""
    if follows.is_conversation:
        return _conversation_of(request, follows.name or "").items_json
    if follows.name is None:
        return b""
    try:
        previous = store_of(request).get(owner_of(request), follows.name, StoredResponse)
    except NotKeptError as error:
        raise RequestError(f"previous_response_id: {error}", "previous_response_id") from None
    if previous.in_progress:
        raise RequestError(
            f"previous_response_id={previous.id!r} is the id of a response that has not ended", "previous_response_id"
        )
    return previous.context


def _conversation_of(request: Request, name: str) -> StoredConversation:
    try:
        return store_of(request).get(owner_of(request), name, StoredConversation)
    except NotKeptError as error:
        raise RequestError(f"conversation: {error}", "conversation") from None


def _extension(here: Services, owner: bytes, form: ResponseForm) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What a conversation does with an answer to items: it gets both, unless the answer has failed."""
    store, name = here.kept, form.conversation
    if store is None or name is None:
        return dict

    def extend(ended: dict[str, Any]) -> dict[str, Any]:
        if ended["status"] not in (COMPLETED, INCOMPLETE):
            return ended
        try:
            conversation = store.get(owner, name, StoredConversation)
            extend_conversation(store, owner, conversation, [*msgspec.json.decode(form.items), *ended["output"]])
        except (NotKeptError, RequestError) as error:
            return ended | {"status": FAILED, "error": {"code": "server_error", "message": str(error)}}
        return ended

    return extend


def _store_for(here: Services, form: ResponseForm) -> ClientStore | None:
    """Where the answer is to be stored; None: it is not to be. Raises RequestError for what needs a store."""
    if here.kept is None:
        for name, asked in {"store": form.store, "background": form.background}.items():
            if asked:
                raise RequestError(f"{name}=true is not supported: {NO_STORE}", name)
        return None
    if form.background and form.store is False:
        raise RequestError("background=true is not allowed with store=false: who would get the answer?", "background")
    return None if form.store is False else here.kept


def _deltas(here: Services, started: _Started, head: ResponseHead, *, is_stored: bool) -> ResponseDeltas:
    form = started.body.form
    params = started.body.requests[0].request.params
    fields: dict[str, Any] = msgspec.json.decode(started.form.fields)
    fields |= {name: getattr(params, name, None) for name in ("temperature", "top_p")}
    fields |= {"store": is_stored, "background": started.form.background, "service_tier": "default"}
    make_parser = functools.partial(here.parsers.make, form.message)
    usage = Usage(started.body.requests, here.engine.block_size)
    return ResponseDeltas(head, usage, make_parser, fields, form.tokens)


def _keep(store: ClientStore, owner: bytes, stored: StoredResponse, ended: dict[str, Any]) -> dict[str, Any]:
    """Store an answer that has ended, and return what is told of it. One that is too large is not stored, or, where
    that is the only way to get it, has failed."""
    stored.set(_encode(ended), ended["status"])
    if stored.is_closed or store.put(owner, stored):
        return ended
    if not stored.is_background:
        return ended | {"store": False}
    ended |= {"status": FAILED, "error": {"code": "server_error", "message": NO_ROOM}, "output": []}
    stored.forget_events()
    stored.set(_encode(ended), FAILED)
    store.put(owner, stored)
    return ended


def _has_room(store: ClientStore, owner: bytes, stored: StoredResponse) -> bool:
    """Whether what a response has become can be stored."""
    return stored.is_closed or store.put(owner, stored)


def _followed(here: Services, stored: StoredResponse, first: int, headers: dict[str, str] | None = None) -> EventStream:
    """The events of a response, from the `first` on."""
    return EventStream(lambda sink: stored.follow(first), headers, keep_alive=KeepAlive(here.keep_alive_s))


def json_answer(body: bytes, headers: dict[str, str] | None = None) -> Response:
    """JSON that is written already, as a response."""
    return Response(body, headers=headers, media_type="application/json")
