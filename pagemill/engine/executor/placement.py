"""Which worker goes where on a cluster: what is asked of it, which rank takes which place, and why it does not fit.

Pure arithmetic over resources by name; knows no cluster.

Tensor-parallel ranks talk most, so a stage's ranks are asked for in one bundle, which is never split over nodes, as
long as the nodes are large enough for that. Otherwise each rank is a bundle, and ranks that are neighbours get places
that are neighbours.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]


@dataclass(frozen=True)
class BundlePlan:
    """Bundles of resources, all alike; each holds `ranks_per_bundle` workers and is on one node."""

    num_bundles: int
    ranks_per_bundle: int
    bundle: dict[str, float]

    def fits(self, nodes: Sequence[Resources]) -> bool:
        """Whether nodes with these resources, all of them free, have room."""
        return sum(_times(node, self.bundle) for node in nodes) >= self.num_bundles


def bundle_plans(tensor_parallel_size: int, pipeline_parallel_size: int, per_worker: Resources) -> list[BundlePlan]:
    """What may be asked of a cluster for all workers, best first."""
    sizes = [tensor_parallel_size] if tensor_parallel_size == 1 else [tensor_parallel_size, 1]
    world_size = tensor_parallel_size * pipeline_parallel_size
    return [
        BundlePlan(world_size // size, size, {name: amount * size for name, amount in per_worker.items()})
        for size in sizes
    ]


def bundle_of_ranks(nodes: Sequence[str], ranks_per_bundle: int) -> list[int]:
    """The bundle of each rank, given the node of each bundle: the ranks of a node are consecutive, and the node with
    the most bundles comes first."""
    counts = Counter(nodes)
    order = sorted(range(len(nodes)), key=lambda bundle: (-counts[nodes[bundle]], nodes[bundle], bundle))
    return [order[rank // ranks_per_bundle] for rank in range(len(nodes) * ranks_per_bundle)]


def local_ranks(nodes: Sequence[str]) -> list[int]:
    """The index of each rank among those of its node, given the node of each rank."""
    return [list(nodes[:rank]).count(node) for rank, node in enumerate(nodes)]


def describe_shortage(plan: BundlePlan, nodes: Mapping[str, Resources], timeout_s: float) -> str:
    """Why workers found no place: what is needed, and what the nodes (address -> resources) have in all."""
    num_workers = plan.num_bundles * plan.ranks_per_bundle
    has = "; ".join(f"{address} has {_amounts(node, plan.bundle)}" for address, node in nodes.items())
    why = "not all of it is free" if plan.fits(list(nodes.values())) else "that is not enough"
    per_worker = {name: amount / plan.ranks_per_bundle for name, amount in plan.bundle.items()}
    return (
        f"the Ray cluster had no room for {num_workers} workers of {_amounts(per_worker, per_worker)} each within "
        f"{timeout_s:g} s; its {len(nodes)} nodes: {has or 'none'}; {why}"
    )


def _times(node: Resources, bundle: Resources) -> int:
    return min(int(node.get(name, 0) // amount) for name, amount in bundle.items())


def _amounts(resources: Resources, names: Resources) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in names)
