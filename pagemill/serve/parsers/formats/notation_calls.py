"""Formats of calls whose arguments are literals of a language."""

from typing import Final

from pagemill.serve.parsers.format import Calls, Head, NotationCall, Written

_PYTHON: Final = NotationCall(Head(end=("(",), chars=r"[\w.]", pattern=r"(?P<name>[^\W\d][\w.]*)"))

PYTHONIC: Final = Calls(
    models="Llama 3.2 and others that write Python",
    written=(Written("[", ", ", "]"),),
    form=(_PYTHON,),
    starts=("[",),
)
LLAMA4_PYTHONIC: Final = Calls(
    models="Llama 4",
    written=(Written("<|python_start|>[", ", ", "]<|python_end|>"),),
    form=(_PYTHON,),
    begin=("<|python_start|>",),
    end=("<|python_end|>",),
    starts=("[",),
)
GEMMA4: Final = Calls(
    models="Gemma 4",
    written=(Written("<|tool_call>", "<tool_call|><|tool_call>", "<tool_call|>"),),
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
    written=(Written("<start_function_call>", "<end_function_call><start_function_call>", "<end_function_call>"),),
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
OLMO3: Final = Calls(
    models="OLMo 3",
    written=(Written("<function_calls>\n", "\n", "\n</function_calls>"),),
    form=(_PYTHON,),
    begin=("<function_calls>",),
    end=("</function_calls>",),
)
LFM2: Final = Calls(
    models="LFM2",
    written=(Written("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),),
    form=(_PYTHON,),
    begin=("<|tool_call_start|>",),
    end=("<|tool_call_end|>",),
)
