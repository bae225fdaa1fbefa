"""A Ray of threads: actors in this process, placement groups by arithmetic. What an executor asks of Ray, no more.

Refuses whatever is not bytes on its way to or from an actor (a title apart), as Ray would pickle it.
"""

import sys
import threading
import types
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any, Self

import pytest

KILLED = "The actor died.\n\tpid: 1\nThe actor is dead because somebody killed it.\n Some common causes are sad"
HERE = threading.local()
"""The actor that this thread works for."""


class RayError(Exception):
    pass


class GetTimeoutError(RayError, TimeoutError):
    pass


class ActorDiedError(RayError):
    pass


class Group:
    def __init__(self, ray: "FakeRay", bundles: list[dict[str, float]]) -> None:
        self.ray = ray
        self.bundles = bundles
        self.nodes = ray.pack(bundles)

    def wait(self, timeout_s: float) -> bool:
        self.ray.waited.append(timeout_s)
        return self.nodes is not None


class Actor:
    """A handle. Calls run in order on one thread; those of a concurrency group on another."""

    def __init__(self, ray: "FakeRay", kind: type[Any], args: Any, options: Any) -> None:
        self.ray, self.options = ray, options
        group = options["scheduling_strategy"]
        self.node = group.placement_group.nodes[group.placement_group_bundle_index]
        self.gpus = [ray.take_gpu(self.node) for _ in range(options["num_gpus"])]
        self.pools: dict[str, futures.ThreadPoolExecutor] = {}
        self.pending: set[Reference] = set()
        self.is_dead = False
        self.object = type(kind.__name__, (kind,), {})(*args)  # its own class: in Ray it has its own process

    def __getattr__(self, name: str) -> "Method":
        return Method(self, name)

    def call(self, name: str, message: Any, options: Any) -> "Reference | None":
        num_returns, group = options.get("num_returns", 1), options.get("concurrency_group", "default")
        assert all(isinstance(part, bytes) for part in message), f"{name} was called with {message}"
        pool = self.pools.setdefault(group, futures.ThreadPoolExecutor(1))
        reference = Reference()
        if self.is_dead:
            reference.fail(ActorDiedError(KILLED))
            return reference
        self.pending.add(reference)
        pool.submit(self.run, name, message, reference, num_returns)
        return reference if num_returns else None

    def run(self, name: str, message: Any, reference: "Reference", num_returns: int) -> None:
        HERE.actor = self
        try:
            result = getattr(self.object, name)(*message)
            assert not num_returns or isinstance(result, bytes), f"{name} returned {result}"
        except Exception as error:
            result = None
            reference.fail(RayError(f"{name}: {error!r}"))
        self.pending.discard(reference)
        reference.finish(result)

    def die(self) -> None:
        self.is_dead = True
        self.object._crashed.set()  # ends the pulse that its thread is in
        for reference in list(self.pending):
            reference.fail(ActorDiedError(KILLED))
        for pool in self.pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


class Reference(futures.Future[Any]):
    def finish(self, result: object) -> None:
        if not self.done():
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.done():
            self.set_exception(error)


class Method:
    def __init__(self, actor: Actor, name: str, chosen: Any = None) -> None:
        self.actor, self.name, self.chosen = actor, name, chosen or {}

    def options(self, **options: Any) -> "Method":
        return Method(self.actor, self.name, options)

    def remote(self, *message: Any) -> Reference | None:
        parts = [part.result() if isinstance(part, Reference) else part for part in message]
        return self.actor.call(self.name, parts, self.chosen)


class ActorClass:
    def __init__(self, ray: "FakeRay", kind: type[Any], **options: Any) -> None:
        self.ray, self.kind, self.chosen = ray, kind, options

    def options(self, **options: Any) -> "ActorClass":
        return ActorClass(self.ray, self.kind, **options)

    def remote(self, *args: Any) -> Actor:
        actor = Actor(self.ray, self.kind, args, self.chosen)
        self.ray.actors.append(actor)
        return actor


class FakeRay(types.ModuleType):
    """The module `ray` on a cluster of `nodes`: resources by address. `running`: the cluster is there before."""

    def __init__(self, nodes: dict[str, dict[str, float]], *, running: bool = True, marks: Iterable[str] = ()) -> None:
        super().__init__("ray")
        self.resources, self.running, self.marks = nodes, running, marks
        self.free = {address: dict(amounts) for address, amounts in nodes.items()}
        self.gpus_left = {address: list(range(int(amounts.get("GPU", 0)))) for address, amounts in nodes.items()}
        self.inits: list[tuple[str | None, dict[str, Any]]] = []
        self.actors: list[Actor] = []
        self.groups: list[Group] = []
        self.removed: list[Group] = []
        self.puts: list[Any] = []
        self.waited: list[float] = []
        self.connected = False
        self.exceptions = types.SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
        util: Any = types.ModuleType("ray.util")
        self.util = util
        util.get_node_ip_address = lambda: HERE.actor.node
        util.placement_group = self.make_group
        util.placement_group_table = lambda group: {"bundles_to_node_id": dict(enumerate(group.nodes))}
        util.remove_placement_group = self.removed.append
        strategies: Any = types.ModuleType("ray.util.scheduling_strategies")
        self.strategies = strategies
        strategies.PlacementGroupSchedulingStrategy = lambda group, bundle: types.SimpleNamespace(
            placement_group=group, placement_group_bundle_index=bundle
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        for name, module in (("", self), (".util", self.util), (".util.scheduling_strategies", self.strategies)):
            monkeypatch.setitem(sys.modules, f"ray{name}", module)
        return self

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, address: str | None = None, **options: Any) -> None:
        self.inits.append((address, options))
        if address == "auto" and not self.running:
            raise ConnectionError("Could not find any running Ray instance")
        if address not in ("auto", "local", "10.0.0.1:6379"):
            raise ConnectionError(f"nobody is at {address}")
        self.connected = True
        self.started_here = address == "local"

    def shutdown(self) -> None:
        self.connected = False

    def nodes(self) -> list[dict[str, object]]:
        return [
            {"Alive": True, "NodeManagerAddress": address, "Resources": amounts}
            for address, amounts in self.resources.items()
        ] + [{"Alive": False, "NodeManagerAddress": "10.9.9.9", "Resources": {"CPU": 99.0}}]

    def cluster_resources(self) -> dict[str, float]:
        return {} if self.started_here else dict.fromkeys(self.marks, 1.0)

    def make_group(self, bundles: list[dict[str, float]], strategy: str) -> Group:
        assert strategy == "PACK"
        self.groups.append(Group(self, bundles))
        return self.groups[-1]

    def pack(self, bundles: list[dict[str, float]]) -> list[str] | None:
        """The node of each bundle; the last node first, so that nothing can rely on an order. None: no room."""
        free = {address: dict(amounts) for address, amounts in self.free.items()}
        nodes = []
        for bundle in bundles:
            fitting = [node for node in free if all(free[node].get(name, 0) >= bundle[name] for name in bundle)]
            if not fitting:
                return None
            nodes.append(fitting[-1])
            for name, amount in bundle.items():
                free[fitting[-1]][name] -= amount
        return nodes

    def take_gpu(self, node: str) -> int:
        return self.gpus_left[node].pop()

    def remote(self, **options: Any) -> Callable[[type[Any]], ActorClass]:
        assert options == {"concurrency_groups": {"pulses": 1}}
        return lambda kind: ActorClass(self, kind)

    def put(self, message: Any) -> Reference:
        assert isinstance(message, bytes)
        self.puts.append(len(message))
        reference = Reference()
        reference.set_result(message)
        return reference

    def get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, list):
            return [self.get(reference, timeout) for reference in references]
        try:
            return references.result(timeout)
        except futures.TimeoutError as error:
            raise GetTimeoutError("not in time") from error

    def wait(self, references: Any, num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        when = futures.FIRST_COMPLETED if num_returns == 1 else futures.ALL_COMPLETED
        futures.wait(references, timeout, when)
        ready = [reference for reference in references if reference.done()]
        ready = ready[:num_returns]
        return ready, [reference for reference in references if reference not in ready]

    def kill(self, actor: Actor) -> None:
        actor.die()

    def get_runtime_context(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            get_node_id=lambda: f"id-{HERE.actor.node}", get_accelerator_ids=lambda: {"GPU": HERE.actor.gpus}
        )
