"""Which formats a model writes, by its chat template: the marks that the template shows the model, or writes itself.
Does not know how a format is read."""

from collections.abc import Sequence
from typing import Final, NamedTuple

AUTO: Final = "auto"
"""The name that stands for a choice by the template."""


class Sign(NamedTuple):
    """What a template of a format has in it."""

    name: str
    """Of the parser."""
    texts: tuple[str, ...]
    """All of them."""


TOOL_SIGNS: Final = (
    Sign("openai", ("<|channel|>", "<|message|>")),
    Sign("kimi_k3", ("<|open|>", "<|sep|>")),
    Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Sign("deepseek_v3", ("<\uff5ctool▁calls▁begin\uff5c>", "```json")),
    Sign("deepseek_v31", ("<\uff5ctool▁calls▁begin\uff5c>",)),
    Sign("step3", ("<steptml:invoke",)),
    Sign("gemma4", ("<|tool_call>", "<tool_call|>")),
    Sign("functiongemma", ("<start_function_call>",)),
    Sign("minimax_m2", ("<minimax:tool_call>",)),
    Sign("seed_oss", ("<seed:tool_call>",)),
    Sign("longcat", ("<longcat_tool_call>",)),
    Sign("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    Sign("glm45", ("<tool_call>", "<arg_key>")),
    Sign("lfm2", ("<|tool_call_start|>",)),
    Sign("olmo3", ("<function_calls>",)),
    Sign("nemotron_nano_v2", ("<TOOLCALL>",)),
    Sign("gigachat3", ("function call", "role_sep")),
    Sign("cohere_command3", ("<|START_ACTION|>",)),
    Sign("granite", ("<|tool_call|>", "<|start_of_role|>")),
    Sign("internlm", ("<|action_start|>",)),
    Sign("ernie45", ("<tool_call>", "<response>")),
    Sign("hunyuan_a13b", ("<tool_calls>",)),
    Sign("mistral", ("[TOOL_CALLS]",)),
    Sign("phi4_mini_json", ("functools",)),
    Sign("llama4_pythonic", ("<|header_start|>", "<|python_start|>")),
    Sign("llama3_json", ("<|start_header_id|>", '"parameters"')),
    Sign("hermes", ("<tool_call>",)),
)
"""The first of which a template has all texts."""
REASONING_SIGNS: Final = (
    Sign("openai_gptoss", ("<|channel|>", "<|message|>")),
    Sign("kimi_k3", ("<|open|>", "<|sep|>")),
    Sign("gemma4", ("<|channel>",)),
    Sign("seed_oss", ("<seed:think>",)),
    Sign("longcat", ("<longcat_think>",)),
    Sign("cohere_command3", ("<|START_THINKING|>",)),
    Sign("mistral", ("[THINK]",)),
    Sign("ernie45", ("</think>", "<response>")),
    Sign("hunyuan_a13b", ("</think>", "<answer>")),
    Sign("qwen3", ("</think>",)),
)


def found_by(signs: Sequence[Sign], template: str | None) -> str | None:
    """The name of the parser for a model with this chat template; None: there is none that fits."""
    if template is None:
        return None
    return next((sign.name for sign in signs if all(text in template for text in sign.texts)), None)
