"""Logits processors: name -> class (`LogitsProcessor`); their order here is the order in which they apply."""

from typing import Any

from pagemill.catalog.registry import Registry

LOGITS: Registry[Any] = Registry(
    "logits processor",
    {"min_tokens": "pagemill.worker.sampling.processors.min_tokens:MinTokensProcessor"},
)
