"""Formats of calls whose arguments are literals of a language."""

from typing import Final

from pagemill.serve.parsers.format import Calls, Head, NotationCall

_PYTHON: Final = NotationCall(Head(end=("(",), chars=r"[\w.]", pattern=r"(?P<name>[^\W\d][\w.]*)"))

PYTHONIC: Final = Calls(models="Llama 3.2 and others that write Python", form=(_PYTHON,), starts=("[",))
LLAMA4_PYTHONIC: Final = Calls(
    models="Llama 4", form=(_PYTHON,), begin=("<|python_start|>",), end=("<|python_end|>",), starts=("[",)
)
GEMMA4: Final = Calls(
    models="Gemma 4",
    form=(
        NotationCall(
            Head("call:", ("{",), chars=r"[^{}<>\s]"),
            end="}",
            assigns=":",
            quotes=('<|"|>',),
            escapes=False,
            bare_strings=True,
        ),
    ),
    begin=("<|tool_call>",),
    end=("<tool_call|>",),
    many=False,
    keeps_space=True,
)
FUNCTIONGEMMA: Final = Calls(
    models="FunctionGemma",
    form=(
        NotationCall(
            Head("call:", ("{",), chars=r"[^{}<>\s]"),
            end="}",
            assigns=":",
            quotes=("<escape>",),
            escapes=False,
            bare_strings=True,
        ),
    ),
    begin=("<start_function_call>",),
    end=("<end_function_call>",),
    many=False,
    keeps_space=True,
)
OLMO3: Final = Calls(models="OLMo 3", form=(_PYTHON,), begin=("<function_calls>",), end=("</function_calls>",))
LFM2: Final = Calls(models="LFM2", form=(_PYTHON,), begin=("<|tool_call_start|>",), end=("<|tool_call_end|>",))
