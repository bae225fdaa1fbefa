"""Message parsers: name -> class (`MessageParserType`) that finds reasoning or tool calls in what a model writes.

A class that does both is listed in both tables, and used once where both flags name it.
"""

from typing import Any

from pagemill.catalog.registry import Registry

REASONING_PARSERS: Registry[Any] = Registry(
    "reasoning parser",
    {
        "deepseek_r1": "pagemill.serve.parsers.think:DeepSeekR1Parser",
        "qwen3": "pagemill.serve.parsers.think:Qwen3Parser",
    },
)
TOOL_PARSERS: Registry[Any] = Registry("tool call parser", {"hermes": "pagemill.serve.parsers.hermes:HermesParser"})
