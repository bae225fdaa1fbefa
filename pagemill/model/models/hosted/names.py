"""Which tensor of a checkpoint is which parameter of a model of transformers, by transformers' own conversions: some
are renamed, some are made of several (the experts of a layer become one tensor)."""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pagemill.model.loading.weight_map import Target, WeightMap


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint that a conversion starts from."""

    name: str
    shape: tuple[int, ...]
    pattern: str
    """Of the conversion's sources, the one that it is."""


@dataclass(frozen=True)
class Direct:
    """A tensor that is a parameter as it is."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HostedNames(WeightMap):
    """The names of one model's checkpoints."""

    direct: dict[str, Direct] = field(default_factory=dict)
    """Parameter -> the tensor that it is."""
    converted: dict[str, list[Source]] = field(default_factory=dict)
    """First parameter that a conversion makes -> what it starts from, in order."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Parameter -> the other one that it is too: tied weights."""
    _renamings: list[Any] = field(default_factory=list)
    _converters: list[Any] = field(default_factory=list)
    _prefix: str = ""
    _meta: dict[str, Tensor] = field(default_factory=dict)
    _ignored: Sequence[re.Pattern[str]] = ()
    _places: dict[str, int] = field(default_factory=dict)
    """Name of a tensor that is converted, after renaming -> its index among those of its conversion."""

    @classmethod
    def of(cls, model: Any) -> "HostedNames":
        """Of a model without weights, on the meta device."""
        from transformers.conversion_mapping import get_model_conversion_mapping  # optional: transformers
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            revert_weight_conversion,
        )  # optional: transformers

        mapping = get_model_conversion_mapping(model)
        names = cls(
            aliases=_aliases(model),
            _renamings=[entry for entry in mapping if not isinstance(entry, WeightConverter)],
            _converters=[entry for entry in mapping if isinstance(entry, WeightConverter)],
            _prefix=model.base_model_prefix,
            _meta=model.state_dict(),
            _ignored=[re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or []],
        )
        own = {name: tensor for name, tensor in names._meta.items() if name not in names.aliases}
        stored = revert_weight_conversion(model, own)
        for name in sorted(stored, key=dot_natural_key):
            names._add(name, tuple(stored[name].shape))
        return names

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        key, renamed, pattern = self._forward(name)
        if pattern is None:
            self.direct[key] = Direct(name, shape)
            return
        sources = self.converted.setdefault(key, [])
        self._places[renamed] = len(sources)
        sources.append(Source(name, shape, pattern))

    def _forward(self, name: str) -> tuple[str, str, str | None]:
        """(first parameter that it becomes, its name without conversion, the pattern of the conversion if any)."""
        from transformers.core_model_loading import apply_renamings, rename_source_key  # optional: transformers

        key, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._meta)
        if key not in self._meta and name in self._meta:
            key = name
            pattern = None
        return key, apply_renamings(name, self._renamings), pattern

    def target(self, name: str) -> Target | None:
        """Where a tensor goes; None for one that is ignored."""
        key, renamed, pattern = self._forward(name)
        if key in self.aliases or (key not in self._meta and self._is_ignored(name)):
            return None
        if pattern is not None:
            return Target(key, "part", self._places.get(renamed, -1))
        layer, _, kind = _split(key)
        return Target(layer, kind, 0)

    def _is_ignored(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or any(pattern.search(name) for pattern in self._ignored)

    def source_name(self, target: Target) -> str:
        """The checkpoint's name of a target."""
        if target.kind == "part" and target.layer in self.converted:
            return self.converted[target.layer][target.shard].name
        key = f"{target.layer}.{target.kind}" if target.layer else target.kind
        return self.direct[key].name if key in self.direct else f"{self.source_module(target.layer, 0)}.{target.kind}"

    def source_module(self, layer: str, shard: int) -> str:
        """The checkpoint's name of a module."""
        known = self.direct.get(f"{layer}.weight")
        return layer if known is None else known.name.removesuffix(".weight")

    def convert(self, key: str, tensors: list[Tensor], model: Any) -> dict[str, Tensor]:
        """The parameters that a conversion makes of its tensors, which are in the order of `converted`."""
        sources = self.converted[key]
        found = next(entry for entry in self._converters if sources[0].pattern in entry.source_patterns)
        converter = deepcopy(found)
        for source, tensor in zip(sources, tensors, strict=True):
            converter.add_tensor(key, source.name, source.pattern, tensor)
        made = converter.convert(key, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _aliases(model: Any) -> dict[str, str]:
    """Parameters that are another one too, under its name: tied weights."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            aliases[name] = other
    return aliases


def _split(name: str) -> tuple[str, str, str]:
    """(module, '.', kind). What follows `weight` belongs to the kind: q_proj.weight.absmax."""
    layer, dot, rest = name.partition(".weight.")
    if dot:
        return layer, ".", f"weight.{rest}"
    return name.rpartition(".")
