"""pagemill: an LLM inference and serving engine. Public names are imported on first use, so that starting is fast."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill.config.arguments import EngineArgs
    from pagemill.llm import LLM
    from pagemill.messages.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
    from pagemill.messages.pooling_params import PoolingParams
    from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
    from pagemill.serve.async_llm import AsyncLLM

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncLLM": "pagemill.serve.async_llm",
    "CompletionOutput": "pagemill.messages.outputs",
    "EngineArgs": "pagemill.config.arguments",
    "LLM": "pagemill.llm",
    "PoolingOutput": "pagemill.messages.outputs",
    "PoolingParams": "pagemill.messages.pooling_params",
    "PoolingRequestOutput": "pagemill.messages.outputs",
    "RequestOutput": "pagemill.messages.outputs",
    "RequestOutputKind": "pagemill.messages.sampling_params",
    "SamplingParams": "pagemill.messages.sampling_params",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pagemill' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
