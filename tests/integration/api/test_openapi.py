"""The server against its own OpenAPI document, by schemathesis: whatever is sent, the answer is one that the document
knows, and never a failure of the server. `make fuzz-api` does far more of it (fuzz_api.py)."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from pagemill.config.pooler_config import PoolerConfig
from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore

NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)
ALIASES = {"/v1/score", "/v1/rerank", "/v2/rerank", "/ping"}
"""Other names of routes that are asked anyway."""
OF_VECTORS = {"/v1/embeddings", "/pooling", "/score", "/rerank", "/api/embed", "/api/embeddings"}
NUM_VALID, NUM_INVALID = 6, 2
"""Bodies of a route."""
MAX_FIELDS = 4
"""Of a body, besides those that it must have: with more at once, nearly every body contradicts itself."""


class Core(FakeCore):
    """A core that operators may pause."""

    def call(self, name: str, *args: Any) -> Any:
        if args == ("stop_profile",):
            return '["profile-rank0.json.gz"]'
        return True if name in ("pause", "hold", "resume", "is_paused", "is_done") else super().call(name, *args)


@contextlib.contextmanager
def server(kind: str) -> Iterator[str]:
    """One whose model generates, or pools, with the routes for operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEMILL_SERVER_DEV_MODE", "1")
        pooler = PoolerConfig(pooling_type="LAST", normalize=True) if kind == "pools" else None
        with running_server(Core(), {"pooler": pooler}) as url:
            yield url


OF_CHATS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Fields of bodies of vectors that do not go with `input`."""


def within_reach(document: dict[str, Any]) -> dict[str, Any]:
    """The document with bodies that have a chance: of the model that is served, and with few fields at once."""
    for operation in (found for methods in document["paths"].values() for found in methods.values()):
        if "requestBody" not in operation:
            continue
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
        if {"input", "messages"} <= set(schema["properties"]):  # one of the two
            schema["required"] = ["input"]
            schema["properties"] = {key: value for key, value in schema["properties"].items() if key not in OF_CHATS}
        schema["maxProperties"] = len(schema.get("required", ())) + MAX_FIELDS
        schema["additionalProperties"] = False
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": ["fake"]}
    return document


def ask(url: str, operation: Any, mode: GenerationMode, num_cases: int) -> list[int]:
    """Send cases of an operation, the same every time; the statuses of the answers. Raises where an answer is not as
    the document says."""
    statuses = []

    @seed(19)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(base_url=url, timeout=300)
        case.validate_response(answer, checks=load_checks())
        statuses.append(answer.status_code)

    check()
    if operation.path == "/drain":
        httpx.post(f"{url}/drain?undo=true", timeout=300).raise_for_status()  # the others are to be answered
    return statuses


@functools.cache
def load_checks() -> list[Any]:
    load_all_checks()
    return [CHECKS.get_one(name) for name in NAMES]


@pytest.mark.parametrize("kind", ["generates", "pools"])
def test_whatever_is_sent(kind: str) -> None:
    accepted = set()
    with server(kind) as url:
        document = httpx.get(f"{url}/openapi.json", timeout=300).json()
        for found in schemathesis.openapi.from_dict(within_reach(document)).get_all_operations():
            operation = found.ok()
            if operation.path in ALIASES or (kind == "pools" and operation.path not in OF_VECTORS):
                continue
            has_body = operation.method == "post" and "requestBody" in operation.definition.raw
            statuses = ask(url, operation, GenerationMode.POSITIVE, NUM_VALID if has_body else 1)
            if has_body:
                statuses += ask(url, operation, GenerationMode.NEGATIVE, NUM_INVALID)
            if 200 in statuses:
                accepted.add(operation.path)
    assert {"/v1/embeddings", "/score"} <= accepted if kind == "pools" else {"/detokenize", "/v1/models"} <= accepted
