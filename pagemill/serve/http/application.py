"""`Application`: a FastAPI application in which a request passes our middleware and nothing else on its way to its
route, and a route that takes the request alone and makes its response itself is called with it.

FastAPI's own layers are for what our middleware does (errors, limits of bodies), and for what routes here do not use
(telemetry); solving the parameters of a route that has none costs as much as reading the body. Routes that have
parameters, or return something else than a response, are left to FastAPI. OpenAPI documents are the same.
"""

import copy
import inspect
import typing
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill.errors import RequestError

Endpoint = Callable[[Request], Awaitable[Response]]


class Application(FastAPI):
    """Errors are answered by its middleware, all of them."""

    __call__ = Starlette.__call__

    def build_middleware_stack(self) -> ASGIApp:
        """The middleware around the router."""
        app: ASGIApp = self.router
        for kind, arguments, named in reversed(self.user_middleware):
            app = kind(app, *arguments, **named)
        return app


def shortened(route: BaseRoute) -> BaseRoute:
    """The route, for an `Application`: a copy, which calls its endpoint where that is all there is to do."""
    if not isinstance(route, APIRoute):
        return route
    short = copy.copy(route)
    short.app = _direct(route.endpoint) if _takes_request_alone(route) else _Solved(route.app)
    return short


def _takes_request_alone(route: APIRoute) -> bool:
    """Whether a route does nothing but to call its endpoint, with the request, for a response."""
    if type(route).get_route_handler is not APIRoute.get_route_handler or route.dependencies:
        return False
    return _is_of_request_alone(route.endpoint)


@cache
def _is_of_request_alone(endpoint: Endpoint) -> bool:
    """Whether the signature is `async (Request) -> Response`."""
    if not inspect.iscoroutinefunction(endpoint) or len(inspect.signature(endpoint).parameters) != 1:
        return False
    *takes, returns = typing.get_type_hints(endpoint).items()
    return [kind for _, kind in takes] == [Request] and returns == ("return", Response)


def _direct(endpoint: Endpoint) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return app


class _Solved:
    """What a route does whose parameters FastAPI finds in a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = AsyncExitStackMiddleware(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError for a parameter that is not what the route declares."""
        try:
            await self._app(scope, receive, send)
        except RequestValidationError as error:
            raise _query_error(error.errors()) from None


def _query_error(problems: typing.Sequence[Any]) -> RequestError:
    field = str(problems[0]["loc"][-1]) if problems else "query"
    reason = problems[0]["msg"] if problems else "it cannot be read"
    return RequestError(f"{field} is not valid: {reason}", field)
