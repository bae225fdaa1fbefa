"""Errors have the form of the API that their path belongs to, whoever finds them, with a route or without."""

from typing import Any

import pytest

from pagemill.serve.http.errors import ANTHROPIC, OLLAMA, OPENAI, form_of_errors
from tests.unit.serve.http.conftest import Connect

PATHS = {
    "/api/chat": OLLAMA,
    "/api/chat/x": OLLAMA,
    "/api/pull": OLLAMA,
    "/api/blobs/sha256:aa": OLLAMA,
    "/v1/messages": ANTHROPIC,
    "/v1/messages/batches": ANTHROPIC,
    "/v1/chat/completions": OPENAI,
    "/nothing": OPENAI,
}


def form_of(answer: dict[str, Any]) -> str:
    """By the members of the object; raises where it is none of the three."""
    if isinstance(answer["error"], str):
        assert set(answer) == {"error"}
        return OLLAMA
    if "type" in answer:
        assert set(answer) == {"type", "error", "request_id"}
        assert (answer["type"], set(answer["error"])) == ("error", {"type", "message"})
        return ANTHROPIC
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return OPENAI


@pytest.mark.parametrize(("path", "form"), PATHS.items())
async def test_the_form_is_that_of_the_path(connect: Connect, path: str, form: str) -> None:
    client = await connect()
    answers = [
        await client.post(path, content=b"{"),
        await client.put(path, json={}),
        await client.post(path, json={}, headers={"host": "evil.example"}),
        await client.post(path, json={}, headers={"content-encoding": "gzip"}),
        await client.post(path, content=b"{}", headers={"content-type": "text/plain", "sec-fetch-site": "same-origin"}),
        await client.post(path, content=b"{}", headers={"content-length": "99999999"}),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert form_of(answer.json()) == form, answer.text
    assert {answer.status_code for answer in answers[2:]} == {403, 413, 415}


@pytest.mark.parametrize(("path", "form"), PATHS.items())
async def test_of_who_has_no_key(connect: Connect, path: str, form: str) -> None:
    client = await connect(api_key=("secret",))
    answer = await client.post(path, json={})
    assert answer.status_code == 401
    assert form_of(answer.json()) == form


def test_other_paths_are_openais() -> None:
    assert [form_of_errors(path) for path in ("", "/", "/apis", "//api/chat", "/v1/models")] == [OPENAI] * 5


@pytest.mark.parametrize(("fields", "said"), [
    ({"echo": "yes"}, "echo='yes' is not allowed: "), ({"max_tokens": 1.5}, "max_tokens=1.5 is not allowed: "),
    ({"model": 5}, "model=5 is not allowed: "), ({"user": {"a": "x" * 500}}, "user={'a': 'xxx"),
])  # fmt: skip
async def test_a_value_of_a_wrong_type_is_shown(connect: Connect, fields: dict[str, Any], said: str) -> None:
    answer = await (await connect()).post("/v1/completions", json={"prompt": "hi", **fields})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message[: len(said)]) == (400, said)
    assert len(message) < 300


async def test_a_field_that_is_missing_has_no_value(connect: Connect) -> None:
    answer = await (await connect()).post("/tokenize", json={"model": "fake"})
    assert "=" not in answer.json()["error"]["message"]
