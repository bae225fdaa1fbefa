"""Messages as users send them."""

from typing import Any

import pytest

from pagemill.errors import RequestError
from pagemill.serve.processing.conversation import parse_conversation


def test_parts_are_joined_and_developers_are_systems() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = parse_conversation([
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ])  # fmt: skip
    assert parsed == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]


@pytest.mark.parametrize(("messages", "field"), [
    ([], "messages"),
    ("hi", "messages"),
    (None, "messages"),
    (["hi"], "messages.0"),
    ([{"role": "user", "content": "a"}] * 5000, "messages"),
    ([{"role": "user", "content": "a"}, {"role": "robot", "content": "a"}], "messages.1.role"),
    ([{"role": ["user"], "content": "a"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content.0.text"),
])  # fmt: skip
def test_refused(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_conversation(messages)
    assert raised.value.field == field
