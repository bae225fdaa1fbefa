"""What the routes of one app share, and how they get at it. Does not know which routes there are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from pagemill.observability.shared_metrics import SharedMetrics
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.client_limits import ClientLimits
from pagemill.serve.http.client_store import ClientStore
from pagemill.serve.http.intake import Intake
from pagemill.serve.http.orders import Orders
from pagemill.serve.http.peers import Peers
from pagemill.serve.http.request_log import RequestLog
from pagemill.serve.http.responses import ServedModel
from pagemill.serve.parsers.choose import MessageParsers


@dataclass(frozen=True)
class Services:
    """`app.state.services`: one engine, and what stands between it and the routes."""

    engine: AsyncLLM
    model: ServedModel
    intake: Intake
    parsers: MessageParsers
    orders: Orders
    """For all API servers."""
    log: RequestLog
    """About requests for the model."""
    peers: Peers
    """The other API servers, and which of them has stored what."""
    shared_metrics: SharedMetrics | None = None
    """Those of several servers together; None where this is the only one."""
    limits: ClientLimits = field(default_factory=ClientLimits)
    """What each key may ask for."""
    keep_alive_s: float = 0.0
    """After how much silence a stream says that it is alive; 0: never."""
    kept: ClientStore | None = None
    """What clients have had stored; None: nothing is."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Settings, for the operator."""


def services(request: Request) -> Services:
    """The services of the app that got the request."""
    found: Services = request.app.state.services
    return found
