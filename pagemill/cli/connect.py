"""`pagemill connect NAME`: prints what a coding agent needs to use a server.

Asks the server for its model and whether it has the endpoint that the agent uses. Prints no key: the agent reads it
from a variable of the environment.
"""

import argparse
from typing import Any

from pagemill import envs
from pagemill.catalog.agents import AGENTS, Agent
from pagemill.cli.errors import ServerError
from pagemill.cli.session import DEFAULT_URL

KEY = "$PAGEMILL_API_KEY"
NO_KEY = "none"
"""Agents want something, also where the server wants nothing."""
UNKNOWN_CONTEXT = 8192
"""Tokens, of a server that does not say."""
OUTPUT_SHARE = 4
"""An answer may take one part in so many of the context: agents ask for all of it each time, and a request that leaves
no room for its prompt is refused."""


def add_parser(subparsers: Any) -> None:
    """Add the command and its flags."""
    names = "; ".join(f"{name}: {agent.title}" for name, agent in AGENTS.items())
    parser = subparsers.add_parser(
        "connect",
        description="Print what a coding agent needs to use a running server. " + names,
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=tuple(AGENTS), metavar="NAME", help="the agent: " + ", ".join(AGENTS))
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the server is (default: {DEFAULT_URL})")
    parser.add_argument("--model", help="name of the model (default: the server is asked)")
    parser.add_argument("--api-key", help="key that the server asks for (default: PAGEMILL_API_KEY); it is not printed")


def run(args: argparse.Namespace) -> int:
    """Print what the agent needs; 0. Raises ServerError when the server does not answer, or cannot serve the agent."""
    from pagemill.cli.server_facts import ServerFacts  # deferred: httpx

    agent = AGENTS[args.name]
    key = args.api_key or envs.api_key()
    with ServerFacts(args.url, key) as server:
        model = args.model or server.model()
        if not server.has(agent.path):
            raise ServerError(f"the server at {server.url} has no {agent.path}, which {agent.title} uses")
        context = server.context_length(model) or UNKNOWN_CONTEXT
        print(instructions(agent, server.url, model, context, bool(key)), end="")
    return 0


def instructions(agent: Agent, url: str, model: str, context: int, has_key: bool) -> str:
    """What to set, and where, for one agent. `context`: tokens of prompt and answer together."""
    output = max(1, context // OUTPUT_SHARE)
    return agent.text.format(url=url, model=model, context=context, output=output, key=KEY if has_key else NO_KEY)
