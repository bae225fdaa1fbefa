"""`pagemill serve`: an OpenAI-compatible server. Starts it; knows nothing about how it serves."""

import argparse
from pathlib import Path
from typing import Any

from pagemill.artifacts.aliases import ALIASES
from pagemill.cli.config_file import ConfigFile, with_file
from pagemill.cli.engine_flags import add_engine_flags, engine_args
from pagemill.cli.errors import UsageError
from pagemill.config.arguments import add_flags, make_section
from pagemill.config.fleet_config import FleetConfig
from pagemill.config.server_config import ServerConfig


def add_parser(subparsers: Any) -> None:
    """Add the command and its flags."""
    parser = subparsers.add_parser(
        "serve",
        description="Serve a model over an OpenAI-compatible HTTP API, with a playground page at /.",
        allow_abbrev=False,
    )
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--config", action=ConfigFile, metavar="FILE", help="YAML file of flags, such as max-model-len: 4k; those of "
        "the command line go before",
    )  # fmt: skip
    add_flags(parser, [ServerConfig, FleetConfig])
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the server's exit code."""
    args = with_file(args)
    if args.model_argument is not None:
        if args.model not in (None, args.model_argument):
            raise UsageError(f"two models: MODEL is {args.model_argument!r}, --model is {args.model!r}; give one")
        args.model = args.model_argument
    _check_keys_are_no_model(args)
    server = make_section(ServerConfig, vars(args))
    fleet = make_section(FleetConfig, vars(args))
    engine = engine_args(args)
    from pagemill.fleet.serve import serve  # deferred: torch and fastapi

    return serve(engine, server, fleet)


def _check_keys_are_no_model(args: argparse.Namespace) -> None:
    """`--api-key` takes every word behind it: a model there would be served as a key."""
    last = (args.api_key or [""])[-1]
    if args.model is None and len(args.api_key or ()) > 1 and (last in ALIASES or "/" in last or Path(last).exists()):
        raise UsageError(f"{last!r} behind --api-key is taken for a key; give the model first, or as --model {last}")
