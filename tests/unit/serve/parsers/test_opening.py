"""Where messages begin, and what a form of their content leaves free before it."""

import pytest

from pagemill.messages.structured_outputs import FreeStart
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.parsers.interface import MessageForm

ASKED = FreeStart((("</think>",),), "<think>", True)
BEGUN = FreeStart((("</think>",),), None, True)
HARMONY = FreeStart((("<|channel|>final",), ("<|message|>",)))
KIMI_ENDS = (("<|close|>think<|sep|>", "<|open|>response<|sep|>"),)


@pytest.mark.parametrize(
    ("name", "form", "expected"),
    [
        (None, MessageForm("assistant\n"), None),
        ("qwen3", MessageForm("assistant\n"), ASKED),
        ("qwen3", MessageForm("assistant\n<think>\n"), BEGUN),
        ("qwen3", MessageForm("assistant\n<think>\n\n</think>\n\n"), None),
        ("qwen3", MessageForm("", "<think>Why"), BEGUN),
        ("qwen3", MessageForm("", "<think>Why?</think>Well"), None),
        ("qwen3", MessageForm("", "Well"), ASKED),
        ("deepseek_r1", MessageForm("assistant\n"), BEGUN),
        ("deepseek_r1", MessageForm("assistant\n<think></think>"), None),
        ("gemma4", MessageForm("model\n"), FreeStart((("<channel|>",),), "<|channel>thought", True)),
        ("kimi_k3", MessageForm("|>"), FreeStart(KIMI_ENDS, "<|open|>think<|sep|>")),
        ("kimi_k3", MessageForm("|><|open|>think<|sep|>"), FreeStart(KIMI_ENDS)),
        ("kimi_k3", MessageForm("|><|open|>response<|sep|>"), None),
        ("openai_gptoss", MessageForm("<|start|>assistant"), HARMONY),
        ("openai_gptoss", MessageForm("<|start|>assistant<|channel|>analysis<|message|>"), HARMONY),
        ("openai_gptoss", MessageForm("<|start|>assistant<|channel|>final<|message|>"), None),
        ("openai_gptoss", MessageForm("<|start|>assistant<|channel|>final <|constrain|>json<|message|>"), None),
        ("openai_gptoss", MessageForm("<|start|>assistant<|channel|>final"), HARMONY),
    ],
)
def test_reasoning_before_a_form(name: str | None, form: MessageForm, expected: FreeStart | None) -> None:
    assert ParserSettings(name).reasoning_before(form) == expected
