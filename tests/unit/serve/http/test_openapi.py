"""The OpenAPI document, made of routes."""

import json
from typing import Any

import jsonschema
import pytest
from fastapi import APIRouter, Response

from pagemill.catalog.endpoints import ENDPOINTS
from pagemill.serve.http.auth import PUBLIC
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import ANTHROPIC
from pagemill.serve.http.openapi import STATUSES, document_of, field_texts, operations_of
from pagemill.serve.http.schemas.answers import TokenCounts
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.tokenize import TokenizeBody

ALL_ROUTES = [route for name in ENDPOINTS for route in ENDPOINTS.resolve(name).routes]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return document_of(ALL_ROUTES, with_keys=True)


def test_every_route_says_what_its_bodies_are() -> None:
    assert [f"{found.method} {found.path}" for found in operations_of(ALL_ROUTES) if not found.is_described] == []


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    for part in json.dumps(document).split('"$ref": "#/')[1:]:
        found: Any = document
        for name in part.partition('"')[0].split("/"):
            found = found[name]
        assert found


def test_schemas_are_schemas(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    chat = {"$ref": "#/components/schemas/ChatBody", "components": document["components"]}
    jsonschema.validate({"messages": [{"role": "user", "content": "hi"}], "temperature": 1.0}, chat)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"messages": [{"role": "nobody", "content": "hi"}]}, chat)


def test_a_route_lists_what_it_may_answer_with(document: dict[str, Any]) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "415", "429", "431", "500", "503"} <= set(chat["responses"])
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert chat["security"] == [{"bearer": []}, {"key": []}]
    health = document["paths"]["/health"]["get"]
    assert "401" not in health["responses"] and "security" not in health and "requestBody" not in health
    mode = document["paths"]["/pause"]["post"]["parameters"][0]
    assert (mode["name"], mode["in"], mode["schema"]["type"]) == ("mode", "query", "string")
    assert {int(status) for methods in document["paths"].values() for about in methods.values()
            for status in about["responses"]} <= {200, *STATUSES}  # fmt: skip


def test_errors_have_the_form_of_the_routes_api(document: dict[str, Any]) -> None:
    responses = document["paths"]["/v1/messages"]["post"]["responses"]
    assert responses["404"]["$ref"].endswith("/ClaudeError404")
    assert responses["431"]["$ref"].endswith("/ClaudeError431"), "told before there is a request"
    assert document["paths"]["/api/chat"]["post"]["responses"]["400"]["$ref"].endswith("/OllamaError400")


def test_a_route_of_somebody_else() -> None:
    router = APIRouter()

    @router.post("/foo/{name:path}", openapi_extra=describes(list[TokenCounts], body=TokenizeBody) | PUBLIC)
    async def foo(name: str, size: int = 5) -> Response:
        """Do it. More about it."""
        return Response()

    @router.get("/v1/messages/bar")
    async def bar() -> Response:
        return Response()

    described, plain = operations_of(router.routes)
    assert (described.path, described.summary, described.is_public) == ("/foo/{name}", "Do it", True)
    assert (plain.errors, plain.is_described) == (ANTHROPIC, False)
    written = document_of(router.routes)["paths"]
    assert [found["name"] for found in written["/foo/{name}"]["post"]["parameters"]] == ["name", "size"]
    assert written["/v1/messages/bar"]["get"]["responses"]["200"]["content"]["application/json"]["schema"] == {}


def test_fields_are_described_by_the_texts_below_them() -> None:
    texts = field_texts(ChatBody)
    assert texts["top_logprobs"].startswith("How many of the most likely tokens")
    assert "use_beam_search" in texts, "of a base class"
    assert "model" not in texts
