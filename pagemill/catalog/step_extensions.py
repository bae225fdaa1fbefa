"""Step extensions: name -> `StepExtension` that names its halves; their order here is the order in which they apply."""

from typing import Any

from pagemill.catalog.registry import Registry

STEP_EXTENSIONS: Registry[Any] = Registry(
    "step extension",
    {
        "block_copies": "pagemill.messages.block_copies:BLOCK_COPIES",
        "grammar_masks": "pagemill.messages.grammar_masks:GRAMMAR_MASKS",
    },
)
