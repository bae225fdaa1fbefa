"""`WeightMap`: checkpoint tensor name -> (layer, kind, shard), declared by the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes."""

    layer: str
    kind: str
    """weight or bias."""
    shard: int
    """Index within the layer's stack; 0 for layers that are not stacked."""


@dataclass(frozen=True)
class WeightMap:
    """Names of a checkpoint, as the model's modules see them."""

    stack: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module -> the checkpoint modules that it is stacked from, in order."""
    strip_prefix: str = ""
    ignore: tuple[str, ...] = ()
    """Name endings of tensors that the model does not use."""
    experts: tuple[str, ...] = ()
    """Linear layers of an expert in a checkpoint: gate, up and down. Expert i of module `experts` has them as
    experts.i.NAME; here they are shards 3 * i, 3 * i + 1 and 3 * i + 2 of the module."""
    mlp: str = "mlp"
    """A checkpoint's name of the module that is called mlp here."""

    def with_experts(self, gate: str, up: str, down: str, mlp: str = "mlp") -> "WeightMap":
        """The same names, and these for a mixture of experts."""
        return replace(self, experts=(gate, up, down), mlp=mlp)

    def target(self, name: str) -> Target | None:
        """Where a tensor goes; None for one that is ignored."""
        if name.endswith(self.ignore):
            return None
        layer, _, kind = name.removeprefix(self.strip_prefix).replace(f".{self.mlp}.", ".mlp.").rpartition(".")
        parent, _, leaf = layer.rpartition(".")
        module, _, number = parent.rpartition(".")
        if leaf in self.experts and module.endswith(".experts") and number.isdecimal():
            return Target(module, kind, int(number) * len(self.experts) + self.experts.index(leaf))
        for stacked, parts in self.stack.items():
            if leaf in parts:
                return Target(f"{parent}.{stacked}", kind, parts.index(leaf))
        return Target(layer, kind, 0)

    def source_name(self, target: Target) -> str:
        """The checkpoint's name of a target, for error messages."""
        parent, _, leaf = target.layer.rpartition(".")
        parts = self.stack.get(leaf)
        layer = f"{parent}.{parts[target.shard]}" if parts else target.layer
        if leaf == "experts" and self.experts:
            expert, which = divmod(target.shard, len(self.experts))
            layer = f"{target.layer}.{expert}.{self.experts[which]}"
        layer = layer.replace(".mlp.", f".{self.mlp}.")
        prefix = "" if target.layer.startswith("lm_head") else self.strip_prefix
        return f"{prefix}{layer}.{target.kind}"
