"""/v1/conversations: kept, changed, used by responses."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.unit.serve.http.conftest import Connect

PATH = "/v1/conversations"
STORE: dict[str, Any] = {"response_store_bytes": 1 << 20}
HI = {"type": "message", "role": "user", "content": "hi"}


async def begun(client: httpx.AsyncClient, **fields: Any) -> str:
    """The path of a new conversation."""
    answer = await client.post(PATH, json=fields)
    assert answer.status_code == 200, answer.text
    return f"{PATH}/{answer.json()['id']}"


async def texts(client: httpx.AsyncClient, path: str) -> list[str]:
    """What was said in a conversation, in order."""
    listed = (await client.get(f"{path}/items", params={"order": "asc", "limit": 100})).json()
    return [item["content"][0]["text"] for item in listed["data"]]


async def test_a_conversation_and_its_items(connect: Connect) -> None:
    client = await connect(**STORE)
    made = (await client.post(PATH, json={"items": [HI], "metadata": {"a": "b"}})).json()
    path = f"{PATH}/{made['id']}"
    assert made["id"].startswith("conv_") and made["created_at"] > 0
    assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
    assert (await client.get(path)).json() == made
    changed = (await client.post(path, json={"metadata": {"c": "d"}})).json()
    assert changed == made | {"metadata": {"c": "d"}} == (await client.get(path)).json()
    added = (await client.post(f"{path}/items", json={"items": [HI, {"role": "assistant", "content": "ho"}]})).json()
    assert [item["role"] for item in added["data"]] == ["user", "assistant"]
    assert (added["object"], added["has_more"], added["last_id"]) == ("list", False, added["data"][1]["id"])
    assert await texts(client, path) == ["hi", "hi", "ho"]
    item = added["data"][1]
    assert (await client.get(f"{path}/items/{item['id']}")).json() == item
    assert (await client.delete(f"{path}/items/{item['id']}")).json() == changed
    assert (await client.get(f"{path}/items/{item['id']}")).status_code == 404
    assert (await client.delete(f"{path}/items/{item['id']}")).status_code == 404
    assert await texts(client, path) == ["hi", "hi"]
    gone = (await client.delete(path)).json()
    assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    for answer in (await client.get(path), await client.get(f"{path}/items"), await client.delete(path)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_an_id_that_is_taken_is_another(connect: Connect) -> None:
    client = await connect(**STORE)
    path = await begun(client, items=[HI | {"id": "msg_1"}])
    added = (await client.post(f"{path}/items", json={"items": [HI | {"id": "msg_1"}]})).json()
    assert added["data"][0]["id"] != "msg_1"
    assert await texts(client, path) == ["hi", "hi"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}, {"store": False}])
async def test_a_response_goes_on_with_it(connect: Connect, fields: dict[str, Any]) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core, **STORE)
    path = await begun(client, items=[HI])
    name = path.removeprefix(f"{PATH}/")
    answer = await client.post("/v1/responses", json={"input": "and?", "conversation": name} | fields)
    assert answer.status_code == 200, answer.text
    async with asyncio.timeout(120):
        while len(await texts(client, path)) < 3:
            await asyncio.sleep(0.005)
    assert bytes(core.seen[0].prompt_token_ids) == b"[user]hi[user]and?[assistant]"
    assert await texts(client, path) == ["hi", "and?", "ok"]
    again = await client.post("/v1/responses", json={"input": "so", "conversation": {"id": name}})
    assert again.json()["conversation"] == {"id": name}
    assert bytes(core.seen[1].prompt_token_ids) == b"[user]hi[user]and?[assistant]ok[user]so[assistant]"


async def test_a_new_conversation_is_empty(connect: Connect) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core, **STORE)
    path = await begun(client)
    listed = (await client.get(f"{path}/items")).json()
    assert listed == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    await client.post("/v1/responses", json={"input": "hi", "conversation": path.removeprefix(f"{PATH}/")})
    assert await texts(client, path) == ["hi", "ok"]


async def test_what_has_failed_is_no_part_of_it(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS), fail_after=3), **STORE)
    path = await begun(client)
    body = {"input": "hi", "conversation": path.removeprefix(f"{PATH}/"), "stream": True}
    assert "response.failed" in (await client.post("/v1/responses", json=body)).text
    assert await texts(client, path) == []


async def test_one_that_is_full_stays_as_it_is(connect: Connect) -> None:
    client = await connect(FakeCore(say("a" * 200, EOS)), response_store_bytes=2048)
    path = await begun(client, items=[HI])
    large = await client.post(f"{path}/items", json={"items": [HI | {"content": "a" * 2048}]})
    assert (large.status_code, large.json()["error"]["param"]) == (400, "items")
    assert await texts(client, path) == ["hi"]
    assert (await client.post(PATH, json={"items": [HI | {"content": "a" * 2048}]})).status_code == 400
    body = {"input": "b" * 30, "conversation": path.removeprefix(f"{PATH}/"), "store": False}
    for _ in range(8):
        answer = (await client.post("/v1/responses", json=body)).json()
        if answer.get("status") != "completed":
            break
    else:
        raise AssertionError("it never was full")
    assert len(await texts(client, path)) % 2 == 1, "hi, and whole turns"


async def test_a_key_sees_only_its_own(connect: Connect) -> None:
    client = await connect(**STORE, api_key=("ann", "bob"))
    ann, bob = ({"authorization": f"Bearer {key}"} for key in ("ann", "bob"))
    made = (await client.post(PATH, json={"items": [HI]}, headers=ann)).json()
    path = f"{PATH}/{made['id']}"
    item = (await client.get(f"{path}/items", headers=ann)).json()["first_id"]
    asked: list[tuple[str, str, Any]] = [
        ("GET", "", None), ("POST", "", {}), ("DELETE", "", None), ("GET", "/items", None),
        ("POST", "/items", {"items": [HI]}), ("GET", f"/items/{item}", None), ("DELETE", f"/items/{item}", None),
    ]  # fmt: skip
    for method, rest, body in asked:
        assert (await client.request(method, path + rest, json=body, headers=bob)).status_code == 404
    follow = await client.post("/v1/responses", json={"input": "hi", "conversation": made["id"]}, headers=bob)
    assert (follow.status_code, follow.json()["error"]["param"]) == (400, "conversation")


@pytest.mark.parametrize(("rest", "body", "named"), [
    ("", {"items": 5}, "items"), ("", {"items": [5]}, "items.0"), ("", {"items": [HI] * 21}, "items"),
    ("", {"metadata": 5}, "metadata"), ("/NAME", {"metadata": {"a": 5}}, "metadata"),
    ("/NAME/items", {"items": []}, "items"), ("/NAME/items", {}, "items"),
    ("/NAME/items", {"items": [{"type": "image"}]}, "items.0"),
])  # fmt: skip
async def test_what_is_wrong_is_named(connect: Connect, rest: str, body: dict[str, Any], named: str) -> None:
    client = await connect(**STORE)
    name = (await begun(client)).removeprefix(f"{PATH}/")
    answer = await client.post(PATH + rest.replace("NAME", name), json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named), answer.text


@pytest.mark.parametrize(("fields", "named"), [
    ({"conversation": "conv_x"}, "conversation"), ({"conversation": 5}, "conversation"),
    ({"conversation": {}}, "conversation"),
    ({"conversation": "conv_x", "previous_response_id": "resp_x"}, "previous_response_id"),
])  # fmt: skip
async def test_what_is_wrong_in_a_response(connect: Connect, fields: dict[str, Any], named: str) -> None:
    client = await connect(**STORE)
    answer = await client.post("/v1/responses", json={"input": "hi"} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named), answer.text


async def test_without_a_store_there_are_none(connect: Connect) -> None:
    client = await connect()
    for answer in (await client.post(PATH, json={}), await client.get(f"{PATH}/x")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_supported")
