"""`pagemill models`: which models are in the caches of this machine; fetches and removes them."""

import argparse
from typing import Any

DOWNLOAD_DIR_HELP = "folder of hub downloads (default: the hub's own cache)"


def add_parser(subparsers: Any) -> None:
    """Add the command, its own subcommands and their flags."""
    parser = subparsers.add_parser(
        "models", description="List, fetch and remove models of the caches of this machine.", allow_abbrev=False
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="print name, size and place of each")
    pull = actions.add_parser("pull", help="fetch models, or check that they are there")
    remove = actions.add_parser("remove", help="delete models from the cache")
    for action in (pull, remove):
        action.add_argument("names", nargs="+", metavar="NAME", help="alias or hub id, as --model takes it")
    pull.add_argument("--revision", help="branch, tag or commit on the hub")
    for action in (listing, pull, remove):
        action.add_argument("--download-dir", help=DOWNLOAD_DIR_HELP)


def run(args: argparse.Namespace) -> int:
    """Do what is asked for; 0."""
    return {"list": _list, "pull": _pull, "remove": _remove}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from pagemill.artifacts.aliases import ALIASES  # deferred, with the next: huggingface_hub
    from pagemill.artifacts.cache import cached_models

    found = cached_models(args.download_dir)
    absent = [(name, "-", "fetched on first use") for name in ALIASES if name not in {model.name for model in found}]
    rows = [(model.name, f"{model.num_bytes / 10**6:,.0f} MB", str(model.path)) for model in found] + absent
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, size, path in rows:
        print(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {path}")
    return 0


def _pull(args: argparse.Namespace) -> int:
    from pagemill.artifacts.describe import locate  # deferred: numpy

    for name in args.names:
        print(f"{name}  {locate(name, args.revision, args.download_dir)}")
    return 0


def _remove(args: argparse.Namespace) -> int:
    from pagemill.artifacts.cache import remove  # deferred: huggingface_hub

    for name in args.names:
        print(f"{name}  {remove(name, args.download_dir) / 10**6:,.0f} MB freed")
    return 0
