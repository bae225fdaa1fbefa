"""Grammar backends: name for the setting `backend` of structured outputs -> class (`GrammarBackend`)."""

from typing import Any

from pagemill.catalog.registry import Registry

GUIDANCE = "guidance"
"""Name of the default, which is always installed; plug-ins add more to the table."""

GRAMMARS: Registry[Any] = Registry(
    "grammar backend",
    {
        GUIDANCE: "pagemill.grammar.backends.guidance:GuidanceBackend",
        "xgrammar": "pagemill.grammar.backends.xgrammar:XGrammarBackend",
    },
)
