"""`pagemill info`: versions, the machine and the known models, for bug reports. Imports none of what it reports on.

Reads no setting, so it cannot print a secret.
"""

import argparse
import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from pagemill import __version__
from pagemill.catalog.models import MODELS
from pagemill.catalog.platforms import PLATFORMS

PACKAGES = ("torch", "numpy", "safetensors", "gguf", "tokenizers", "fastapi", "uvicorn", "transformers")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    subparsers.add_parser("info", description="Print versions, the machine and the known models.")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0."""
    print_rows(list(report()))
    return 0


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """(name, value) lines, values below each other."""
    width = max((len(name) for name, _ in rows), default=0) + 2
    for name, value in rows:
        print(f"{name:<{width}}{value}")


def report() -> Iterator[tuple[str, str]]:
    """(name, value) lines."""
    yield "pagemill", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    for package in PACKAGES:
        yield package, _version(package)
    for name in PLATFORMS:
        device = PLATFORMS.resolve(name)()
        absence = device.absence()
        if absence is not None:
            yield name, f"none: {absence}"
            continue
        facts = device.facts()
        if facts.title:
            yield f"{name} device", facts.title
        yield f"{name} cores", str(facts.num_cores)
        yield f"{name} free memory", f"{facts.free_bytes / 2**30:.1f} GiB"
        yield f"{name} types", f"{', '.join(facts.fast_dtypes)} at full speed"
    yield "architectures", ", ".join(MODELS)
    yield from _aliases()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _aliases() -> Iterator[tuple[str, str]]:
    from pagemill.artifacts.aliases import ALIASES, cached  # deferred: hashlib and subprocess

    for alias, model in ALIASES.items():
        yield f"model {alias}", f"{model.title}, {'in the cache' if cached(alias) else 'fetched on first use'}"
