"""HTTP endpoints: name -> FastAPI router, in the order in which they are mounted."""

from typing import Any

from pagemill.catalog.registry import Registry

ENDPOINTS: Registry[Any] = Registry(
    "endpoint",
    {
        "chat": "pagemill.serve.http.routes.chat:router",
        "completions": "pagemill.serve.http.routes.completions:router",
        "embeddings": "pagemill.serve.http.routes.embeddings:router",
        "models": "pagemill.serve.http.routes.models:router",
        "health": "pagemill.serve.http.routes.health:router",
        "metrics": "pagemill.serve.http.routes.metrics:router",
        "playground": "pagemill.serve.http.routes.playground:router",
    },
)
