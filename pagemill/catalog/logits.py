"""Logits processors: name -> class (`LogitsProcessor`); their order here is the order in which they apply."""

from typing import Any

from pagemill.catalog.registry import Registry

LOGITS: Registry[Any] = Registry(
    "logits processor",
    {
        "allowed_token_ids": "pagemill.worker.sampling.processors.allowed_token_ids:AllowedTokensProcessor",
        "bad_words": "pagemill.worker.sampling.processors.bad_words:BadWordsProcessor",
        "min_tokens": "pagemill.worker.sampling.processors.min_tokens:MinTokensProcessor",
        "logit_bias": "pagemill.worker.sampling.processors.logit_bias:LogitBiasProcessor",
        "penalties": "pagemill.worker.sampling.processors.penalties:PenaltiesProcessor",
    },
)
