"""`RayCluster`: this process's connection to a Ray cluster, and room on it for workers.

Knows nothing about what the workers do. The only modules that touch Ray are this one, ray_workers.py and
worker/ray_actor.py; none imports it before it is used.
"""

import importlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pagemill import envs
from pagemill.engine.executor.placement import BundlePlan, describe_shortage
from pagemill.errors import ConfigError
from pagemill.log import get_logger

logger = get_logger(__name__)

LOCAL_STORE_BYTES = 128 << 20
"""Shared memory of a cluster that is started here: only messages above 100 KB pass through it."""
PRIVATE = "pagemill-private"
"""A resource that marks a cluster as another engine's own: it has no room for anybody else."""
STAGE_S = 5.0
"""How long to wait for whole stages on a node, where they would fit, before taking them apart."""


@dataclass(frozen=True)
class Room:
    """A placement group that Ray has granted."""

    group: Any
    plan: BundlePlan
    nodes: list[str]
    """The node id of each bundle."""


class RayCluster:
    """A connection, shared by all of this process; whoever made one closes it. One that the process had before is used
    and left open.

    RAY_ADDRESS names the cluster; without it, one that runs on this machine is used; else one is started here, with
    room for `num_cpus` at least, which ends with this process. Raises ConfigError.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_open: ClassVar[int] = 0
    _is_ours: ClassVar[bool] = False

    def __init__(self, num_cpus: int) -> None:
        self.ray = import_ray()
        self._is_open = True
        with self._lock:
            if not self.ray.is_initialized():
                _connect(self.ray, num_cpus)
                RayCluster._is_ours = True
            RayCluster._num_open += 1

    def nodes(self) -> dict[str, dict[str, float]]:
        """Address -> resources in all, of the nodes that are alive; addresses shared by nodes get a number."""
        nodes: dict[str, dict[str, float]] = {}
        for node in self.ray.nodes():
            if node["Alive"]:
                address = node["NodeManagerAddress"]
                nodes[address if address not in nodes else f"{address} ({len(nodes)})"] = node["Resources"]
        return nodes

    def reserve(self, plans: Sequence[BundlePlan], timeout_s: float) -> Room:
        """Room for the first of the plans that the cluster can grant. Raises ConfigError, which says what it has and
        what is needed, after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        for plan in plans[:-1]:
            if plan.fits(list(self.nodes().values())) and (room := self._try(plan, min(STAGE_S, timeout_s))):
                return room
        room = self._try(plans[-1], max(0.0, deadline - time.monotonic()))
        if room is None:
            raise ConfigError(describe_shortage(plans[-1], self.nodes(), timeout_s))
        return room

    def give_back(self, room: Room) -> None:
        """End what still runs in a room, and free it."""
        self.ray.util.remove_placement_group(room.group)

    def close(self) -> None:
        """The last one closes the connection, and with it the cluster if it was started here. May be called twice."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            RayCluster._num_open -= 1
            if RayCluster._num_open == 0 and RayCluster._is_ours:
                RayCluster._is_ours = False
                self.ray.shutdown()

    def _try(self, plan: BundlePlan, timeout_s: float) -> Room | None:
        group = self.ray.util.placement_group([plan.bundle] * plan.num_bundles, strategy="PACK")
        if not group.wait(math.ceil(timeout_s)):  # Ray cuts fractions of a second off
            self.ray.util.remove_placement_group(group)
            return None
        nodes = self.ray.util.placement_group_table(group)["bundles_to_node_id"]
        return Room(group, plan, [nodes[bundle] for bundle in range(plan.num_bundles)])


def import_ray() -> Any:
    """The package, which is an extra. Raises ConfigError that names it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "distributed_executor_backend='ray' needs the package ray, which is not installed; "
            "pip install 'pagemill[ray]'"
        ) from error


def _connect(ray: Any, num_cpus: int) -> None:
    address = envs.ray_address()
    if address is not None and "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS={address!r} is that of a Ray client server, through which workers cannot be driven; start "
            "pagemill on a node of the cluster and give HOST:PORT, or auto"
        )
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address != "local" and _found(ray, address):
            return
        _start(ray, num_cpus)
    finally:
        # Ray takes SIGTERM for itself; how this process ends is not its business.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _found(ray: Any, address: str | None) -> bool:
    """Connect to a cluster that exists; False where none was named and there is none."""
    try:
        ray.init(address=address or "auto", logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if address in (None, "auto") and isinstance(error, ConnectionError):
            return False
        raise ConfigError(f"RAY_ADDRESS={address or 'auto'!r}: no Ray cluster can be reached there: {error}") from error
    if address is None and PRIVATE in ray.cluster_resources():
        logger.debug("the Ray cluster on this machine is another engine's own")
        ray.shutdown()
        return False
    return True


def _start(ray: Any, num_cpus: int) -> None:
    logger.info("no Ray cluster runs here; starting one for this engine")
    try:
        ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            resources={PRIVATE: 1},
            object_store_memory=LOCAL_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(f"a Ray cluster cannot be started on this machine: {error}") from error
