"""`pagemill serve` with hooks for the fault lab: `python -m tests.integration.faults.served ARGUMENTS`.

The engine and the server are those of the product. What differs: a worker by name (LAB_WORKER), a secret that tests
know (LAB_SECRET), less patience with silence (LAB_SILENT_S), shorter pauses between starts that fail (LAB_PAUSE_S, the
longest), and routes that say what only the process itself knows.
"""

import asyncio
import functools
import os
import sys
import threading
from pathlib import Path

import msgspec
from fastapi import APIRouter, Request

from pagemill.catalog.endpoints import ENDPOINTS
from pagemill.cli.main import main
from pagemill.fleet import api_server, api_server_pool, engines, serve
from pagemill.serve.client.zmq import ZmqClient
from pagemill.serve.http.state import services
from pagemill.transport.addresses import tcp_address
from pagemill.utils import children

HERE = "tests.integration.faults.served"
router = APIRouter()


@router.post("/lab/reset")
async def reset(request: Request) -> bool:
    """Whether all blocks of all engines are free; if so, the prefix caches are empty now."""
    return await services(request).engine.reset_prefix_cache()


@router.get("/lab/figures")
async def figures(request: Request) -> dict[str, int]:
    """What this front end holds."""
    engine = services(request).engine
    return {
        "pid": os.getpid(),
        "in_flight": engine.num_in_flight,
        "running": sum(stats.num_running for stats in engine._client.stats().values()),
        "remembered": len(engine._client._in_flight),
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
    }


def install_hooks() -> None:
    ENDPOINTS.add("lab", f"{HERE}:router")
    serve.WORKER = os.environ.get("LAB_WORKER", serve.WORKER)
    engines.new_secret = lambda: os.environ.get("LAB_SECRET", "0" * 64)
    api_server_pool.ENTRY = f"{HERE}:run_front_end"
    silent_s = os.environ.get("LAB_SILENT_S")
    if silent_s is not None:
        serve.LivenessTimeouts = functools.partial(serve.LivenessTimeouts, silent_s=float(silent_s))
        api_server_pool.ApiServerPool = functools.partial(api_server_pool.ApiServerPool, silent_s=3 * float(silent_s))

    if "LAB_PAUSE_S" in os.environ:
        children.LONGEST_PAUSE_S = float(os.environ["LAB_PAUSE_S"])
        children.FIRST_PAUSE_S = children.LONGEST_PAUSE_S / 4
    if "LAB_LINKS" in os.environ:
        api_server.ZmqClient = connect_through_proxy
    if "LAB_TCP" in os.environ:
        engines.EngineFleet._address_of = lambda *_: tcp_address()


def connect_through_proxy(up, hello):
    """Connect to the proxy of an engine, which is told in a file where the engine listens."""
    address = os.environ["LAB_LINKS"].split()[up.index]
    target = Path(os.environ["LAB_TARGETS"]) / f"target-{up.index}"
    target.with_suffix(".new").write_text(up.address)
    target.with_suffix(".new").rename(target)
    return ZmqClient(msgspec.structs.replace(up, address=address), hello)


def run_front_end(payload, report):
    """Entry of a front end in a process of its own."""
    install_hooks()
    api_server.run(payload, report)


if __name__ == "__main__":
    # As a module, so that it is the one that others import.
    import tests.integration.faults.served as served

    served.install_hooks()
    sys.exit(main())
