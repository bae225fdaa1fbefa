"""What the routes of one app share, and how they get at it. Does not know which routes there are."""

from dataclasses import dataclass

from starlette.requests import Request

from pagemill.observability.shared_metrics import SharedMetrics
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.handlers.chat import ChatHandler
from pagemill.serve.http.handlers.completions import CompletionHandler
from pagemill.serve.http.handlers.embeddings import EmbeddingHandler
from pagemill.serve.http.intake import Intake
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.salts import KeySalts
from pagemill.serve.http.served_model import ServedModel


@dataclass(frozen=True)
class Services:
    """One engine and the handlers that use it; `app.state.services`."""

    engine: AsyncLLM
    model: ServedModel
    chat: ChatHandler
    completions: CompletionHandler
    embeddings: EmbeddingHandler
    shared_metrics: SharedMetrics | None
    """Those of several servers together; None where this is the only one."""


def make_services(
    engine: AsyncLLM,
    model: ServedModel,
    metrics: SharedMetrics | None = None,
    helpers: PreparerPool | None = None,
    salts: KeySalts | None = None,
) -> Services:
    """The handlers around an engine. Without `helpers`, large bodies are prepared here; without `salts`, clients share
    cached prefixes whatever their keys are."""
    intake = Intake(engine, model, helpers, salts)
    return Services(
        engine,
        model,
        ChatHandler(engine, model, intake),
        CompletionHandler(engine, model, intake),
        EmbeddingHandler(engine, model, intake),
        metrics,
    )


def services(request: Request) -> Services:
    """The services of the app that got the request."""
    found: Services = request.app.state.services
    return found
