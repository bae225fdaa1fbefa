"""Heads and nodes with scripted engines, as processes: entries that import no more than they need."""

import json
import signal
from collections.abc import Callable

from pagemill.config.fleet_plan import FleetPlan
from pagemill.fleet.engines import EngineFleet, FleetSpec
from pagemill.fleet.node import run_headless
from tests.fakes.scripted_fleet import WORKER, fleet_config

SECRET = "a secret of the test's"
TIMEOUT_S = 10.0
"""Of silence, after which the other side is given up: on a busy machine nobody falls silent for so long."""
HEAD_RETURN_S = 120.0
"""What a node gives a head to come back."""


def node_payload(
    folder: object,
    port: int,
    *,
    first: int = 1,
    count: int = 1,
    size: int = 2,
    lockstep: bool = False,
    timeout_s: float = TIMEOUT_S,
    head_return_s: float = HEAD_RETURN_S,
) -> bytes:
    """For `run_node`: `count` engines from rank `first` on, of `size` in all, for the head on a port."""
    return json.dumps([str(folder), port, first, count, size, lockstep, timeout_s, head_return_s]).encode()


def run_node(payload: bytes, report: Callable[[bytes], object]) -> None:
    """Entry of a node's process: engines from a rank on, of so many in all."""
    folder, port, first, count, size, lockstep, timeout_s, head_return_s = json.loads(payload)
    plan = FleetPlan(size, range(first, first + count), True, ("127.0.0.1", port), lockstep=lockstep)
    spec = FleetSpec(fleet_config(folder), WORKER, plan, secret=SECRET, node_timeout_s=timeout_s)
    run_headless(spec, head_return_s=head_return_s)


def run_head(payload: bytes, report: Callable[[bytes], object]) -> None:
    """Entry of a head's process."""
    folder, port = json.loads(payload)
    plan = FleetPlan(2, range(1), head=("127.0.0.1", port))
    with EngineFleet(FleetSpec(fleet_config(folder), WORKER, plan, secret=SECRET)) as engines:
        engines.start()
        engines.wait_ready()
        report(b"ready")
        signal.pause()
