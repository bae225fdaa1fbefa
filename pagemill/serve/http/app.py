"""`build_app`: the ASGI application, from the catalogue's routers and a list of middleware.
Does not know how the engine was started or who serves the application."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from pagemill import envs
from pagemill.catalog.endpoints import DOCS, ENDPOINTS, OPERATOR
from pagemill.catalog.registry import Registry
from pagemill.config.model_names import ModelNames
from pagemill.config.server_access import access_of
from pagemill.config.server_config import ServerConfig
from pagemill.config.server_logs import ServerLogs
from pagemill.observability.shared_metrics import SharedMetrics
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.access_log import AccessLogMiddleware
from pagemill.serve.http.application import Application, shortened
from pagemill.serve.http.auth import AuthMiddleware, name_of_key
from pagemill.serve.http.client_limits import ClientLimits, ClientTable
from pagemill.serve.http.client_store import ClientStore
from pagemill.serve.http.errors import ErrorMiddleware
from pagemill.serve.http.intake import Intake
from pagemill.serve.http.middleware import BodyLimitMiddleware, RequestIdMiddleware
from pagemill.serve.http.orders import Orders
from pagemill.serve.http.own_middleware import own_middleware
from pagemill.serve.http.peers import Peers
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.request_log import RequestLog
from pagemill.serve.http.responses import ServedModel, now
from pagemill.serve.http.root_path import RootPathMiddleware, check_root_path, root_path_of
from pagemill.serve.http.routing import SlashRedirect, with_head
from pagemill.serve.http.salts import KeySalts
from pagemill.serve.http.schemas.support import IGNORED_FIELDS_HEADER
from pagemill.serve.http.site_guard import SiteGuardMiddleware
from pagemill.serve.http.state import Services
from pagemill.serve.parsers.choose import MessageParsers, ParserSettings


def build_app(
    engine: AsyncLLM,
    config: ServerConfig,
    endpoints: Registry[Any] = ENDPOINTS,
    *,
    metrics: SharedMetrics | None = None,
    helpers: PreparerPool | None = None,
    secret: str = "",
    info: Mapping[str, Any] | None = None,
    orders: Orders | None = None,
    clients: ClientTable | None = None,
    peers: Peers | None = None,
) -> FastAPI:
    """The application around an engine, which is shut down with it. `metrics` are those of several servers; None: this
    one answers for itself. `helpers` prepare large bodies, and end with the application; None: it is done here.
    `secret` is one that all API servers of the engines share. `info`: settings, for the operator.
    `orders`: to other API servers, `clients`: what the clients of all of them have in flight and left, `peers`: to ask
    them for what they have stored; None: there are none.

    Requests need a key of `config.api_key` (or PAGEMILL_API_KEY) when one is set, except by routes that say `PUBLIC`
    (auth.py).
    Raises ConfigError for settings of access, of parsers, of the log, of paths or of middleware that cannot work.
    """

    peers = peers or Peers()
    kept = _store(config, peers.count)
    orders = orders or Orders(engine)

    app = Application(
        title="pagemill",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lambda app: _running(app, helpers),
        middleware=_middleware(config),
    )
    _mount(app, endpoints, config)
    model = ServedModel.of(ModelNames.of(config, engine.facts.name), now())
    parsers = ParserSettings.of(config).for_model(engine.tokenizer)
    limits = _limits(config, engine, clients)
    log = RequestLog(ServerLogs.of(config), engine.tokenizer)
    intake = Intake(engine, model, helpers, _salts(config, secret), parsers, limits, log)
    message_parsers = MessageParsers(parsers, engine.tokenizer)
    app.state.needs_key = bool(access_of(config).api_keys)
    silence_s = config.sse_keep_alive_interval
    app.state.services = Services(
        engine, model, intake, message_parsers, orders, log, peers, metrics, limits, silence_s, kept, info or {}
    )
    return app


@contextlib.asynccontextmanager
async def _running(app: FastAPI, helpers: PreparerPool | None) -> AsyncIterator[None]:
    """From the start of the application to its end, which is that of all that it was given."""
    here: Services = app.state.services
    async with (
        contextlib.nullcontext() if here.shared_metrics is None else here.shared_metrics.running(),
        here.orders.running(),
        contextlib.nullcontext() if here.kept is None else here.peers.running(app),
    ):
        yield
    if here.kept is not None:
        await here.kept.close()
    if helpers is not None:
        await helpers.close()
    await here.engine.shutdown()


def _mount(app: FastAPI, endpoints: Registry[Any], config: ServerConfig) -> None:
    for name in endpoints:
        if (name == OPERATOR and not envs.server_dev_mode()) or (name == DOCS and config.disable_fastapi_docs):
            continue
        # The routes themselves, not the router around them: the API-key check asks each which request it takes.
        app.router.routes.extend(map(shortened, with_head(endpoints.resolve(name).routes)))
    app.router.redirect_slashes = False  # it names the host that the client says this is
    root_path = app.state.root_path = root_path_of(config.root_path)
    check_root_path(root_path, app.router.routes)
    app.router.default = SlashRedirect(app.router.routes, root_path)


def _limits(config: ServerConfig, engine: AsyncLLM, table: ClientTable | None) -> ClientLimits:
    keys = [name_of_key(key) for key in access_of(config).api_keys]
    return ClientLimits(
        config.rate_limit_requests, config.rate_limit_tokens, keys, engine.load_limits, engine.load, table=table
    )


def _store(config: ServerConfig, num_servers: int) -> ClientStore | None:
    """This one's part of what all API servers may store. None: nothing is stored."""
    if not config.response_store_bytes:
        return None
    num_owners = max(len(access_of(config).api_keys), 1)
    return ClientStore(config.response_store_bytes // num_owners // num_servers, config.response_store_ttl)


def _salts(config: ServerConfig, secret: str) -> KeySalts | None:
    """None: clients share cached prefixes, because there is one key, or because the operator says so."""
    num_keys = len(access_of(config).api_keys)
    return KeySalts(secret) if num_keys > 1 and not config.share_prefix_cache else None


def _middleware(config: ServerConfig) -> list[Middleware]:
    """Outermost first. Errors are answered inside CORS, so that browsers may read them. The operator's own comes last:
    it sees what was let in, and bodies with a limit."""
    access = access_of(config)
    logs = ServerLogs.of(config)
    root_path = root_path_of(config.root_path)
    stack = [Middleware(RootPathMiddleware, prefix=root_path)] if root_path else []
    if logs.answered:
        stack.append(Middleware(AccessLogMiddleware, silent_paths=logs.silent_paths))
    stack.append(Middleware(RequestIdMiddleware))
    if access.origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=access.origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", IGNORED_FIELDS_HEADER],
            )
        )
    stack.append(Middleware(ErrorMiddleware, log_stacks=logs.error_stacks))
    if access.api_keys:
        stack.append(Middleware(AuthMiddleware, api_keys=access.api_keys, protect_metrics=config.protect_metrics))
    stack.append(Middleware(SiteGuardMiddleware, access=access))
    stack.append(Middleware(BodyLimitMiddleware))
    return stack + own_middleware(config.middleware)
