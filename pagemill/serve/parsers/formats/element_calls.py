"""Formats of calls that have an element for each argument."""

from typing import Final

from pagemill.serve.parsers.format import Calls, ElementCall, Head, Written
from pagemill.serve.parsers.formats.reasoning import KIMI_K3_TOKENS

_ATTRIBUTE: Final = r'(?P<name>[^"]+)"\s*'

QWEN3_CODER: Final = Calls(
    models="Qwen3-Coder, Qwen3.5 and later, Step-3.5, MiMo, Nemotron 3",
    written=(Written("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),),
    form=(
        ElementCall(Head("<function="), Head("<parameter="), value_end="</parameter>", end="</function>", wraps=True),
    ),
    begin=("<tool_call>",),
    end=("</tool_call>",),
    bare=True,
    ends_reasoning=True,
)
GLM: Final = Calls(
    models="GLM-4.5 to 5",
    written=(Written("<tool_call>", "\n<tool_call>"),),
    form=(
        ElementCall(
            Head(end=("\n", "<arg_key>", "</tool_call>"), keeps_end=True, pattern=r"\s*(?P<name>\S+)\s*"),
            Head("<arg_key>", ("</arg_key>",)),
            value_begin="<arg_value>",
            value_end="</arg_value>",
            end="</tool_call>",
        ),
    ),
    begin=("<tool_call>",),
    many=False,
)


def _dsml(models: str, calls: str, space: str = "") -> Calls:
    """Calls of DeepSeek since V3.2."""
    mark = f"\uff5cDSML\uff5c{space}"
    return Calls(
        models=models,
        written=(Written(f"<{mark}{calls}>\n", "\n", f"\n</{mark}{calls}>"),),
        form=(
            ElementCall(
                Head(f'<{mark}invoke name="', pattern=_ATTRIBUTE + r"(?P<empty>/?)", written='{name}"'),
                Head(
                    f'<{mark}parameter name="',
                    pattern=_ATTRIBUTE + r'string="(?P<string>true|false)"',
                    written='{name}" string="{string}"',
                ),
                value_end=f"</{mark}parameter>",
                end=f"</{mark}invoke>",
            ),
        ),
        begin=(f"<{mark}{calls}>",),
        end=(f"</{mark}{calls}>",),
        noise=True,
    )


DEEPSEEK_V32: Final = _dsml("DeepSeek-V3.2", "function_calls")
DEEPSEEK_V4: Final = _dsml("DeepSeek-V4", "tool_calls")
DEEPSEEK_V41: Final = _dsml("DeepSeek-V4.1", "calls", " ")
KIMI_K3: Final = Calls(
    models="Kimi K3",
    written=(Written("<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),),
    form=(
        ElementCall(
            Head(
                "<|open|>call",
                ("<|sep|>",),
                pattern=r' tool="(?P<name>[^"]+)".*',
                escaped=True,
                written=' tool="{name}" index="{number}"',
            ),
            Head(
                "<|open|>argument",
                ("<|sep|>",),
                pattern=r' key="(?P<name>[^"]*)" type="(?P<type>\w+)".*',
                escaped=True,
                written=' key="{name}" type="{type}"',
            ),
            value_end="<|close|>argument<|sep|>",
            end="<|close|>call<|sep|>",
        ),
    ),
    begin=("<|open|>tools<|sep|>",),
    end=("<|close|>tools<|sep|>",),
    noise=True,
    keeps_space=True,
    ends_reasoning=True,
    tokens=KIMI_K3_TOKENS,
)
MINIMAX_M2: Final = Calls(
    models="MiniMax-M2",
    written=(Written("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),),
    form=(
        ElementCall(
            Head('<invoke name="', pattern=_ATTRIBUTE, written='{name}"'),
            Head('<parameter name="', pattern=_ATTRIBUTE, written='{name}"'),
            value_end="</parameter>",
            end="</invoke>",
        ),
    ),
    begin=("<minimax:tool_call>",),
    end=("</minimax:tool_call>",),
)
SEED_OSS: Final = Calls(
    models="Seed-OSS",
    written=(Written("<seed:tool_call>\n", "\n</seed:tool_call>\n<seed:tool_call>\n", "\n</seed:tool_call>"),),
    form=(ElementCall(Head("<function="), Head("<parameter="), value_end="</parameter>", end="</function>"),),
    begin=("<seed:tool_call>",),
    end=("</seed:tool_call>",),
)
STEP3: Final = Calls(
    models="Step-3",
    written=(Written("<\uff5ctool_calls_begin\uff5c>", "", "<\uff5ctool_calls_end\uff5c>"),),
    form=(
        ElementCall(
            Head('<steptml:invoke name="', pattern=_ATTRIBUTE, written='{name}"'),
            Head('<steptml:parameter name="', pattern=_ATTRIBUTE, written='{name}"'),
            value_end="</steptml:parameter>",
            end="</steptml:invoke>",
        ),
    ),
    begin=("<\uff5ctool_calls_begin\uff5c>",),
    end=("<\uff5ctool_calls_end\uff5c>",),
    noise=True,
)
