"""`pagemill collect-env`: what `pagemill info` prints, and the machine around it, for bug reports.

Of the environment it prints values that cannot be secrets, and that others are set; of files and users it prints
nothing.
"""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from pagemill import envs
from pagemill.cli.info import print_rows, report
from pagemill.utils.containers import container

RELATED = re.compile(
    r"(nvidia[-_].*|triton|flashinfer.*|flash[-_]attn|xformers|vllm|llguidance|msgspec|pyzmq|jinja2|huggingface[-_]hub|"
    r"accelerate|ray|httptools|httpx|pydantic|starlette|uvloop)",
    re.IGNORECASE,
)
"""Names of packages that problems have to do with."""
TIMEOUT_S = 10.0


def add_parser(subparsers: Any) -> None:
    """Add the command `collect-env` to the parser of commands."""
    subparsers.add_parser(
        "collect-env", description="Print versions, the machine and the environment, without secrets, for bug reports."
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 0."""
    print_rows([*report(), *machine(), *packages(), *variables()])
    return 0


def machine() -> Iterator[tuple[str, str]]:
    """(name, value) lines about this machine."""
    memory = psutil.virtual_memory()
    yield "cpu", _cpu_name()
    yield "cpus", f"{psutil.cpu_count()} logical, {psutil.cpu_count(logical=False)} physical"
    yield "memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"
    yield "container", container() or "none"
    yield "compiler", _printed(envs.compiler(), "--version")[0]
    yield (
        "gpus",
        "; ".join(_printed("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")),
    )


def packages() -> Iterator[tuple[str, str]]:
    """(name, version) of installed packages that problems have to do with."""
    found = {(item.name, item.version) for item in importlib.metadata.distributions() if RELATED.fullmatch(item.name)}
    yield from sorted(found, key=lambda row: row[0].lower())


def variables() -> Iterator[tuple[str, str]]:
    """(name, value) of variables of the environment that matter here."""
    yield from envs.report()


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else "unknown"


def _printed(*command: str) -> list[str]:
    """Lines that a program prints; what became of it where there are none."""
    path = shutil.which(command[0])
    if path is None:
        return ["none"]
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ["no answer"]
    return done.stdout.strip().splitlines() or ["no answer"]
