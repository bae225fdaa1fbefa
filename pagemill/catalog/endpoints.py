"""HTTP endpoints: name -> FastAPI router, in the order in which they are mounted."""

from typing import Any

from pagemill.catalog.registry import Registry

OPERATOR = "operator"
"""Mounted on demand only."""
DOCS = "docs"
"""May be left out."""

ENDPOINTS: Registry[Any] = Registry(
    "endpoint",
    {
        "chat": "pagemill.serve.http.routes.chat:router",
        "batch_chat": "pagemill.serve.http.routes.batch_chat:router",
        "completions": "pagemill.serve.http.routes.completions:router",
        "classify": "pagemill.serve.http.routes.classify:router",
        "embeddings": "pagemill.serve.http.routes.embeddings:router",
        "responses": "pagemill.serve.http.routes.responses:router",
        "conversations": "pagemill.serve.http.routes.conversations:router",
        "anthropic": "pagemill.serve.http.routes.anthropic:router",
        "ollama": "pagemill.serve.http.routes.ollama:router",
        "ollama_models": "pagemill.serve.http.routes.ollama_models:router",
        "tokenize": "pagemill.serve.http.routes.tokenize:router",
        "render": "pagemill.serve.http.routes.render:router",
        "cohere": "pagemill.serve.http.routes.cohere:router",
        "scores": "pagemill.serve.http.routes.scores:router",
        "models": "pagemill.serve.http.routes.models:router",
        "health": "pagemill.serve.http.routes.health:router",
        "metrics": "pagemill.serve.http.routes.metrics:router",
        "llama_cpp": "pagemill.serve.http.routes.llama_cpp:router",
        "generate": "pagemill.serve.http.routes.generate:router",
        "infill": "pagemill.serve.http.routes.infill:router",
        DOCS: "pagemill.serve.http.routes.docs:router",
        OPERATOR: "pagemill.serve.http.routes.operator:router",
        "absent": "pagemill.serve.http.routes.absent:router",
        "playground": "pagemill.serve.http.routes.playground:router",
    },
)
