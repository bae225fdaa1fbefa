"""`WeightMap`: checkpoint tensor name -> (layer, kind, shard), declared by the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from pagemill.utils.text import index_of


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes."""

    layer: str
    kind: str
    """weight, bias, or what else a quantized weight is stored in: weight_scale, weight.absmax."""
    shard: int
    """Index within the layer's stack; 0 for layers that are not stacked."""


@dataclass(frozen=True)
class WeightMap:
    """Names of a checkpoint, as the model's modules see them."""

    stack: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module -> the checkpoint modules that it is stacked from, in order; of one, it has another name there. A module
    may be named with the one that it is in: self_attn.o_proj; so may be the one in the checkpoint: router.layer."""
    strip_prefix: str = ""
    ignore: tuple[str, ...] = ()
    """Name endings of tensors that the model does not use."""
    experts: tuple[str, ...] = ()
    """Linear layers of an expert in a checkpoint: gate, up and down. Expert i of module `experts` has them as
    experts.i.NAME; here they are shards 3 * i, 3 * i + 1 and 3 * i + 2 of the module."""
    numbered: Mapping[str, str] = field(default_factory=dict)
    """Module -> what a checkpoint has within it under a number for each shard: q_norm.norms.3 is shard 3 of q_norm."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Module that others are in, such as mlp or layers -> what a checkpoint calls it."""

    def with_experts(self, gate: str, up: str, down: str, mlp: str = "mlp") -> "WeightMap":
        """The same names, and these for a mixture of experts, in a module that the checkpoint calls `mlp`."""
        return replace(self, experts=(gate, up, down), parents={**self.parents, "mlp": mlp})

    def target(self, name: str) -> Target | None:
        """Where a tensor goes; None for one that is ignored."""
        if name.endswith(self.ignore):
            return None
        layer, kind = _split(name.removeprefix(self.strip_prefix))
        parent, _, leaf = layer.rpartition(".")
        if self.parents:
            here = {there: here for here, there in self.parents.items()}
            parent = ".".join(here.get(part, part) for part in parent.split("."))
        module, _, number = parent.rpartition(".")
        expert = index_of(number)
        if leaf in self.experts and module.endswith(".experts") and expert is not None:
            return Target(module, kind, expert * len(self.experts) + self.experts.index(leaf))
        place = index_of(leaf)
        if place is not None and self.numbered.get(module.rpartition(".")[2]) == number:
            return Target(module, kind, place)
        named = _under(parent, leaf)
        for part, within, own, shard in self._shards.get(leaf, ()):
            outer = _without(named, part)
            if outer is not None and f".{outer}".endswith(within):
                return Target(_under(outer, own), kind, shard)
        return Target(named, kind, 0)

    @cached_property
    def _shards(self) -> dict[str, list[tuple[str, str, str, int]]]:
        """Last name of a checkpoint's module -> (the module, what the stack is in, the stack's own name, shard)."""
        shards: dict[str, list[tuple[str, str, str, int]]] = {}
        for stacked, parts in self.stack.items():
            within, _, own = stacked.rpartition(".")
            for shard, part in enumerate(parts):
                place = (part, f".{within}" if within else "", own, shard)
                shards.setdefault(part.rpartition(".")[2], []).append(place)
        return shards

    def source_name(self, target: Target) -> str:
        """The checkpoint's name of a target."""
        return f"{self.source_module(target.layer, target.shard)}.{target.kind}"

    def source_module(self, layer: str, shard: int) -> str:
        """The checkpoint's name of the module that a shard of a layer is loaded from."""
        parent, _, leaf = layer.rpartition(".")
        parts = self.stack.get(leaf) or self.stack.get(f"{parent.rpartition('.')[2]}.{leaf}")
        there = ".".join(self.parents.get(part, part) for part in parent.split("."))
        module = _under(there, parts[shard] if parts else leaf)
        if leaf == "experts" and self.experts:
            expert, which = divmod(shard, len(self.experts))
            module = f"{module}.{expert}.{self.experts[which]}"
        if leaf in self.numbered:
            module = f"{_under(there, self.parents.get(leaf, leaf))}.{self.numbered[leaf]}.{shard}"
        prefix = "" if layer.startswith("lm_head") else self.strip_prefix
        return prefix + module


def _under(parent: str, leaf: str) -> str:
    return f"{parent}.{leaf}" if parent else leaf


def _without(name: str, end: str) -> str | None:
    """The name of the module that has one of this name in it; None: the name ends otherwise."""
    if name == end:
        return ""
    return name.removesuffix(f".{end}") if name.endswith(f".{end}") else None


def _split(name: str) -> tuple[str, str]:
    """(layer, kind) of a tensor's name. What follows `weight` belongs to the kind: q_proj.weight.absmax."""
    layer, dot, rest = name.partition(".weight.")
    if dot:
        return layer, f"weight.{rest}"
    layer, _, kind = name.rpartition(".")
    return layer, kind
