"""Arguments without counterpart."""

from typing import Any

import pytest

from pagemill.errors import RequestError
from pagemill.serve.other_arguments import refuse_others


@pytest.mark.parametrize("given", [
    {}, {"lora_request": None, "tokenization_kwargs": {}, "trace_headers": None}, {"concurrency_limit": 3},
    {"chat_template_content_format": "auto"}, {"pooling_task": "embed"}, {"reset_running_requests": False},
])  # fmt: skip
def test_what_asks_for_nothing_is_accepted(given: dict[str, Any]) -> None:
    refuse_others("LLM.generate", given)


@pytest.mark.parametrize(("name", "value"), [
    ("lora_request", object()), ("tokenization_kwargs", {"truncate_prompt_tokens": 3}), ("pooling_task", "classify"),
    ("data_parallel_rank", 0), ("chat_template_content_format", "openai"), ("reset_connector", 0),
])  # fmt: skip
def test_what_asks_for_something_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is not supported: ") as caught:
        refuse_others("LLM.generate", {name: value})
    assert caught.value.field == name


def test_what_nobody_knows_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"LLM.generate\(\) got an unexpected keyword argument 'prio'"):
        refuse_others("LLM.generate", {"prio": 1})
