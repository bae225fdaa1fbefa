"""Weight formats: name -> function `(facts, dtype, seed, select) -> Iterator[(name, part)]`."""

from typing import Any

from pagemill.catalog.registry import Registry

WEIGHTS: Registry[Any] = Registry(
    "weights format",
    {
        "dummy": "pagemill.model.loading.sources.dummy:iterate",
        "gguf": "pagemill.model.loading.sources.gguf:iterate",
        "safetensors": "pagemill.model.loading.sources.safetensors:iterate",
    },
)
