"""What `make fuzz-api` tells schemathesis of this server: bodies are for the model that is served, lines of JSON can be
read, and a server that was told to take no new requests is told to take them again."""

import json
from typing import Any

import httpx
import schemathesis


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """With any other name, an answer is 404 before anything else is looked at."""
    for name, schema in raw_schema["components"]["schemas"].items():
        if name.endswith("Body") and "model" in schema.get("properties", ()):
            schema["properties"]["model"] = {"enum": ["fake"]}


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """What comes after /drain would get nothing but a 503."""
    if case.path == "/drain" and case.method == "POST":
        base = response.request.url.partition("/drain")[0]
        httpx.post(f"{base}/drain?undo=true", timeout=300).raise_for_status()


@schemathesis.deserializer("application/x-ndjson")
def lines(context: Any, response: Any) -> Any:
    """The last line, which is the one that says the most."""
    return json.loads(response.content.splitlines()[-1])
