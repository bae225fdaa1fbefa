"""A Ray of threads: actors in this process, placement groups by arithmetic. What an executor asks of Ray, no more.

Refuses whatever is not bytes on its way to or from an actor (a title apart), as Ray would pickle it.
"""

import sys
import threading
import types
from concurrent import futures

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
    def __init__(self, ray, bundles):
        self.ray = ray
        self.bundles = bundles
        self.nodes = ray.pack(bundles)

    def wait(self, timeout_s):
        self.ray.waited.append(timeout_s)
        return self.nodes is not None


class Actor:
    """A handle. Calls run in order on one thread; those of a concurrency group on another."""

    def __init__(self, ray, kind, args, options):
        self.ray, self.options = ray, options
        group = options["scheduling_strategy"]
        self.node = group.placement_group.nodes[group.placement_group_bundle_index]
        self.gpus = [ray.take_gpu(self.node) for _ in range(options["num_gpus"])]
        self.pools = {}
        self.pending = set()
        self.is_dead = False
        self.object = type(kind.__name__, (kind,), {})(*args)  # its own class: in Ray it has its own process

    def __getattr__(self, name):
        return Method(self, name)

    def call(self, name, message, options):
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

    def run(self, name, message, reference, num_returns):
        HERE.actor = self
        try:
            result = getattr(self.object, name)(*message)
            assert not num_returns or isinstance(result, bytes), f"{name} returned {result}"
        except Exception as error:
            result = None
            reference.fail(RayError(f"{name}: {error!r}"))
        self.pending.discard(reference)
        reference.finish(result)

    def die(self):
        self.is_dead = True
        self.object._crashed.set()  # ends the pulse that its thread is in
        for reference in list(self.pending):
            reference.fail(ActorDiedError(KILLED))
        for pool in self.pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


class Reference(futures.Future):
    def finish(self, result):
        if not self.done():
            self.set_result(result)

    def fail(self, error):
        if not self.done():
            self.set_exception(error)


class Method:
    def __init__(self, actor, name, chosen=None):
        self.actor, self.name, self.chosen = actor, name, chosen or {}

    def options(self, **options):
        return Method(self.actor, self.name, options)

    def remote(self, *message):
        message = [part.result() if isinstance(part, Reference) else part for part in message]
        return self.actor.call(self.name, message, self.chosen)


class ActorClass:
    def __init__(self, ray, kind, **options):
        self.ray, self.kind, self.chosen = ray, kind, options

    def options(self, **options):
        return ActorClass(self.ray, self.kind, **options)

    def remote(self, *args):
        actor = Actor(self.ray, self.kind, args, self.chosen)
        self.ray.actors.append(actor)
        return actor


class FakeRay(types.ModuleType):
    """The module `ray` on a cluster of `nodes`: resources by address. `running`: the cluster is there before."""

    def __init__(self, nodes, *, running=True, marks=()):
        super().__init__("ray")
        self.resources, self.running, self.marks = nodes, running, marks
        self.free = {address: dict(amounts) for address, amounts in nodes.items()}
        self.gpus_left = {address: list(range(int(amounts.get("GPU", 0)))) for address, amounts in nodes.items()}
        self.inits, self.actors, self.groups, self.removed, self.puts, self.waited = [], [], [], [], [], []
        self.connected = False
        self.exceptions = types.SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
        self.util = types.ModuleType("ray.util")
        self.util.get_node_ip_address = lambda: HERE.actor.node
        self.util.placement_group = self.make_group
        self.util.placement_group_table = lambda group: {"bundles_to_node_id": dict(enumerate(group.nodes))}
        self.util.remove_placement_group = self.removed.append
        self.strategies = types.ModuleType("ray.util.scheduling_strategies")
        self.strategies.PlacementGroupSchedulingStrategy = lambda group, bundle: types.SimpleNamespace(
            placement_group=group, placement_group_bundle_index=bundle
        )

    def install(self, monkeypatch):
        for name, module in (("", self), (".util", self.util), (".util.scheduling_strategies", self.strategies)):
            monkeypatch.setitem(sys.modules, f"ray{name}", module)
        return self

    def is_initialized(self):
        return self.connected

    def init(self, address=None, **options):
        self.inits.append((address, options))
        if address == "auto" and not self.running:
            raise ConnectionError("Could not find any running Ray instance")
        if address not in ("auto", "local", "10.0.0.1:6379"):
            raise ConnectionError(f"nobody is at {address}")
        self.connected = True
        self.started_here = address == "local"

    def shutdown(self):
        self.connected = False

    def nodes(self):
        return [
            {"Alive": True, "NodeManagerAddress": address, "Resources": amounts}
            for address, amounts in self.resources.items()
        ] + [{"Alive": False, "NodeManagerAddress": "10.9.9.9", "Resources": {"CPU": 99.0}}]

    def cluster_resources(self):
        return {} if self.started_here else dict.fromkeys(self.marks, 1.0)

    def make_group(self, bundles, strategy):
        assert strategy == "PACK"
        self.groups.append(Group(self, bundles))
        return self.groups[-1]

    def pack(self, bundles):
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

    def take_gpu(self, node):
        return self.gpus_left[node].pop()

    def remote(self, **options):
        assert options == {"concurrency_groups": {"pulses": 1}}
        return lambda kind: ActorClass(self, kind)

    def put(self, message):
        assert isinstance(message, bytes)
        self.puts.append(len(message))
        reference = Reference()
        reference.set_result(message)
        return reference

    def get(self, references, timeout=None):
        if isinstance(references, list):
            return [self.get(reference, timeout) for reference in references]
        try:
            return references.result(timeout)
        except futures.TimeoutError as error:
            raise GetTimeoutError("not in time") from error

    def wait(self, references, num_returns=1, timeout=None):
        when = futures.FIRST_COMPLETED if num_returns == 1 else futures.ALL_COMPLETED
        futures.wait(references, timeout, when)
        ready = [reference for reference in references if reference.done()]
        ready = ready[:num_returns]
        return ready, [reference for reference in references if reference not in ready]

    def kill(self, actor):
        actor.die()

    def get_runtime_context(self):
        return types.SimpleNamespace(
            get_node_id=lambda: f"id-{HERE.actor.node}", get_accelerator_ids=lambda: {"GPU": HERE.actor.gpus}
        )
