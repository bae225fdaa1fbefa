"""`build_app`: the ASGI application, from the catalogue's routers and a list of middleware.
Does not know how the engine was started or who serves the application."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from pagemill import envs
from pagemill.catalog.endpoints import ENDPOINTS
from pagemill.catalog.registry import Registry
from pagemill.config.sections import ServerConfig
from pagemill.observability.shared_metrics import SharedMetrics
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.auth import AuthMiddleware
from pagemill.serve.http.errors import ErrorMiddleware, answer_http_exception
from pagemill.serve.http.handlers.generation import now
from pagemill.serve.http.middleware import BodyLimitMiddleware, RequestIdMiddleware
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.served_model import ServedModel
from pagemill.serve.http.state import make_services


def build_app(
    engine: AsyncLLM,
    config: ServerConfig,
    endpoints: Registry[Any] = ENDPOINTS,
    *,
    metrics: SharedMetrics | None = None,
    helpers: PreparerPool | None = None,
) -> FastAPI:
    """The application around an engine, which is shut down with it. `metrics` are those of several servers; None: this
    one answers for itself. `helpers` prepare large bodies, and end with the application; None: it is done here.

    Requests need `config.api_key` (or PAGEMILL_API_KEY) when one is set, except for `auth.PUBLIC_PATHS`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.nullcontext() if metrics is None else metrics.running():
            yield
        if helpers is not None:
            await helpers.close()
        await engine.shutdown()

    app = FastAPI(
        title="pagemill",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        middleware=_middleware(config),
        exception_handlers={HTTPException: answer_http_exception},
    )
    for name in endpoints:
        # The routes themselves, not the router around them: the API-key check asks each which request it takes.
        app.router.routes.extend(endpoints.resolve(name).routes)
    model = ServedModel(config.served_model_name or engine.facts.name, now())
    app.state.services = make_services(engine, model, metrics, helpers)
    return app


def _middleware(config: ServerConfig) -> list[Middleware]:
    """Outermost first. Errors are answered inside CORS, so that browsers may read them."""
    stack = [Middleware(RequestIdMiddleware)]
    if config.allowed_origins:
        origins = [origin.strip() for origin in config.allowed_origins.split(",")]
        headers = ["X-Request-Id"]
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=headers,
            )
        )
    stack.append(Middleware(ErrorMiddleware))
    api_key = config.api_key or envs.api_key()
    if api_key:
        stack.append(Middleware(AuthMiddleware, api_key=api_key))
    stack.append(Middleware(BodyLimitMiddleware))
    return stack
