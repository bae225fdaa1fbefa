"""GET /v1/models: names, and aliases of them."""

import pytest

from tests.fakes.fake_core import FakeCore
from tests.unit.serve.http.conftest import Connect

ALIASES = ("claude-*=default", "gpt-4o=tiny", "*/*-mini=org/tiny")


@pytest.mark.parametrize(("name", "is_served"), [
    ("org/tiny", True), ("tiny", True), ("claude-sonnet-9", True), ("claude-", True), ("gpt-4o", True),
    ("a/b-mini", True), ("fake", False), ("gpt-4", False), ("xclaude-1", False), ("claude", False),
    ("default", False),
])  # fmt: skip
async def test_a_request_may_use_any_name(connect: Connect, name: str, is_served: bool) -> None:
    client = await connect(FakeCore(), served_model_name=("org/tiny", "tiny"), model_alias=ALIASES)
    answer = await client.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
    assert answer.status_code == (200 if is_served else 404)
    if is_served:
        assert answer.json()["model"] == "org/tiny"
    else:
        assert answer.json()["error"]["code"] == "model_not_found"
    card = await client.get(f"/v1/models/{name}")
    assert card.status_code == answer.status_code
    if is_served:
        assert card.json()["id"] == name


async def test_patterns_are_not_listed(connect: Connect) -> None:
    client = await connect(served_model_name=("org/tiny", "tiny"), model_alias=ALIASES)
    listed = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["org/tiny", "tiny", "gpt-4o"]
    assert {card["max_model_len"] for card in listed} == {256}
