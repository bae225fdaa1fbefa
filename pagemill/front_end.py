"""The front end of a deployment: tokenizer, `AsyncLLM`, HTTP application and server, in one process.

Does not know how the engines were started: it is told where they are, and what becomes of them.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.config.engine_config import EngineConfig
from pagemill.config.sections import ServerConfig
from pagemill.messages.fleet import EngineUp
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.balancer import BALANCERS
from pagemill.serve.client.fleet import FleetClient
from pagemill.serve.client.zmq import ZmqClient
from pagemill.serve.http.app import build_app
from pagemill.serve.http.server import serve
from pagemill.tokenizers.interface import Tokenizer
from pagemill.transport.handshake import Hello, Role


@dataclass(frozen=True)
class FrontEndPlace:
    """Which of the front ends this is, and what lets it in."""

    index: int
    secret: str

    def hello(self) -> Hello:
        """How it introduces itself to engines."""
        return Hello(secret=self.secret, role=Role.API_SERVER, index=self.index)


def make_fleet(ups: Sequence[EngineUp], place: FrontEndPlace, policy: str = "prefix") -> FleetClient:
    """The client of all engines. `policy` is a name in BALANCERS."""
    return FleetClient(lambda up: ZmqClient(up, place.hello()), ups, BALANCERS[policy]())


def serve_fleet(
    fleet: FleetClient, tokenizer: Tokenizer, config: EngineConfig, server: ServerConfig, sock: socket.socket
) -> None:
    """Serve over HTTP on a bound socket until SIGINT or SIGTERM, then drain."""
    llm = AsyncLLM(fleet, tokenizer, config.facts, config.scheduler)
    serve(build_app(llm, server), sock, server.uvicorn_log_level, llm, server.shutdown_timeout)
