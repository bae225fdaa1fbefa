"""Checkpoints of the compressed-tensors format: weights of 4 or 8 bits, symmetric, packed into 32 (W4A16, W8A16).

Knows no model. On a CPU with the kernels for them the integers are multiplied as they are, with inputs of 8 bits;
elsewhere the weights are dequantized at load.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.log import get_logger
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart
from pagemill.model.quantization.grouped_integers import GroupedIntegers, unpack
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import (
    ExpertSizes,
    ExpertWeights,
    LinearWeight,
    Quantization,
    QuantMethod,
    QuantRequest,
    Role,
)
from pagemill.utils.math import ceil_div

logger = get_logger(__name__)

PACKED = "pack-quantized"
CLASSES = {Role.LINEAR: "Linear", Role.HEAD: "Linear", Role.EMBEDDING: "Embedding"}
"""What a checkpoint calls the classes of layers."""
ORDERED = {None: False, "weight": False, "static": False, "group": True, "dynamic": True}
"""actorder -> whether each input says which group it belongs to (weight_g_idx)."""
_MAX_GROUPS = 100
_MAX_PATTERNS = 200
_MAX_PATTERN = 200
_MAX_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one group of layers is stored."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all of an output."""
    ordered: bool

    def size_for(self, width: int) -> int:
        """Inputs of a group, of so many."""
        return width if self.group_size is None else min(self.group_size, width)


class PackedIntegers(QuantMethod):
    """weight_packed, weight_scale, and weight_g_idx where inputs were ordered."""

    def __init__(self, scheme: Scheme, computing: QuantMethod) -> None:
        """`computing`: the method of the weights once they are read."""
        self._scheme = scheme
        self._computing = computing
        self.takes_blocks = computing.takes_blocks
        self._has_warned = not computing.takes_blocks

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        scheme, (num_rows, width) = self._scheme, shape
        size = scheme.size_for(width)
        num_groups = ceil_div(width, size)
        per_word = 32 // scheme.bits
        # Where every input names its group, a rank's inputs may need any of them.
        scale_columns = None if scheme.ordered or scheme.group_size is None else Axis(1, size)
        packed = StoredTensor(
            "weight_packed", (num_rows, ceil_div(width, per_word)), (torch.int32,), Axis(0), Axis(1, per_word)
        )
        scale = StoredTensor("weight_scale", (num_rows, num_groups), rows=Axis(0), columns=scale_columns)
        original = StoredTensor("weight_shape", (2,), unused=True)
        order = StoredTensor("weight_g_idx", (width,), (torch.int32,), columns=Axis(0), values=range(num_groups))
        return (packed, scale, original, order) if scheme.ordered else (packed, scale, original)

    def decode(
        self, stored: Mapping[str, Tensor | BlockTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | BlockTensor:
        tensors = {kind: tensor for kind, tensor in stored.items() if isinstance(tensor, Tensor)}
        scheme = self._scheme
        columns = part.columns
        integers = unpack(tensors["weight_packed"], scheme.bits)
        first = columns.start % (32 // scheme.bits)
        size = scheme.size_for(part.shape[1])
        if scheme.ordered:
            groups = tensors["weight_g_idx"].long()
        else:
            groups = torch.arange(columns.start, columns.stop, device=integers.device) // size - columns.start // size
        weight = GroupedIntegers(
            scheme.bits, integers[:, first : first + len(columns)].contiguous(), tensors["weight_scale"], groups
        )
        blocks = weight.as_blocks() if self.takes_blocks else None
        if blocks is not None:
            return blocks
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "weights of %d bits whose blocks of 32 inputs have no scale of their own are dequantized", scheme.bits
            )
        return weight.dequantized(dtype)

    def prepare(self, weight: Tensor | BlockTensor, gate: str | None = None) -> LinearWeight:
        return self._computing.prepare(weight, gate)

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        return self._computing.experts(sizes, dtype, device, gate)


class CompressedTensors(Quantization):
    """Each layer as the first group says that names it, or else names its class; those to be ignored are floats."""

    def __init__(self, groups: list[tuple[list[str], QuantMethod]], ignore: list[str], computing: QuantMethod) -> None:
        """`groups`: targets and method of each. Targets are names, classes, or patterns of names after `re:`. Raises
        ModelError for a pattern that is damaged, or could take long."""
        self._ignored = Names(ignore)
        self._groups = [(Names(targets), method) for targets, method in groups]
        self._computing = computing
        num_patterns = sum(len(names.patterns) for names in (self._ignored, *(names for names, _ in self._groups)))
        if len(groups) > _MAX_GROUPS or num_patterns > _MAX_PATTERNS:
            raise ModelError(
                f"quantization_config has {len(groups)} groups and {num_patterns} patterns; at most {_MAX_GROUPS} and "
                f"{_MAX_PATTERNS} are read"
            )

    def method(self, module: str, role: Role) -> QuantMethod:
        kind = CLASSES[role]
        if self._ignored.has(module) or kind in self._ignored.exact:
            return self._computing
        for names, method in self._groups:
            if names.has(module):
                return method
        return next((method for names, method in self._groups if kind in names.exact), self._computing)


class Names:
    """Names of layers, and patterns of names."""

    def __init__(self, targets: list[str]) -> None:
        """Raises ModelError for a pattern that is damaged, or could take long."""
        self.exact = frozenset(target for target in targets if not target.startswith("re:"))
        self.patterns = [_compiled(target[3:]) for target in targets if target.startswith("re:")]

    def has(self, name: str) -> bool:
        """Whether the name is one of them."""
        return name in self.exact or any(pattern.match(name) for pattern in self.patterns)


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    computing = as_stored(request)
    config = Fields("quantization_config", request.config)
    for key in ("transform_config", "moe_sparsity_config"):
        config.refuse(key)
    scheme = config.get("kv_cache_scheme", dict) or {}
    found = scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy", "tensor"), bool(scheme.get("dynamic"))
    if scheme and found != ("float", 8, "tensor", False):  # the one whose scales have a use: load_weights.py
        config.refuse("kv_cache_scheme")
    sparsity = config.get("sparsity_config", dict) or {}
    if sparsity.get("format", "dense") != "dense":
        raise ModelError(f"quantization_config.sparsity_config.format={sparsity['format']!r} is not supported: dense")
    config.choose("quantization_status", (None, "compressed"))
    groups = Fields("quantization_config.config_groups", config.get("config_groups", dict) or {})
    methods: list[tuple[list[str], QuantMethod]] = []
    for name in groups.values:
        group = Fields(f"quantization_config.config_groups.{name}", groups.get(name, dict) or {})
        methods.append((group.strings("targets"), PackedIntegers(_scheme(group, config), computing)))
    if not methods:
        raise ModelError("quantization_config.config_groups has no group")
    if not (computing.takes_blocks or request.dequantize):
        logger.warning(
            "the checkpoint's weights are dequantized to %s: integers are multiplied on CPUs with the native kernels "
            "and dtype=bfloat16 only",
            str(request.dtype)[6:],
        )
    return CompressedTensors(methods, config.strings("ignore"), computing)


def _scheme(group: "Fields", config: "Fields") -> Scheme:
    """Raises ModelError for one that is not supported."""
    (group if group.get("format", str) else config).choose("format", (PACKED,))
    for key in ("input_activations", "output_activations"):
        group.refuse(key)
    weights = Fields(f"{group.name}.weights", group.get("weights", dict) or {})
    weights.choose("type", ("int", None))
    weights.choose("symmetric", (True, None))
    weights.choose("dynamic", (False, None))
    weights.choose("strategy", ("group", "channel", None))
    order = weights.get("actorder", (str, bool))
    ordered = order if isinstance(order, bool) else ORDERED.get(order)
    if ordered is None:
        raise ModelError(f"{weights.name}.actorder={order!r} is not one of group, weight")
    bits = int(weights.choose("num_bits", (4, 8)))
    size = weights.get("group_size", int)
    if weights.get("strategy", str) == "channel" or size == -1:
        return Scheme(bits, None, ordered=False)
    if size is None or isinstance(size, bool) or size < 1:
        raise ModelError(f"{weights.name}.group_size={size!r} is not a positive number")
    return Scheme(bits, size, ordered)


class Fields:
    """The fields of an object in config.json; every error is a ModelError that names the field."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A value of a type; None where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ModelError(f"{self.name}.{key}={_shown(value)} is of a wrong type")
        return value

    def choose(self, key: str, allowed: tuple[Any, ...]) -> Any:
        """One of the values that are supported."""
        value = self.values.get(key)
        if not any(type(value) is type(one) and value == one for one in allowed):
            known = ", ".join(str(one) for one in allowed if one is not None)
            raise ModelError(f"{self.name}.{key}={_shown(value)} is not supported; supported: {known}")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty where there is none."""
        value = self.get(key, list) or []
        if not all(isinstance(one, str) for one in value):
            raise ModelError(f"{self.name}.{key}={_shown(value)} is not a list of strings")
        return list(value)

    def refuse(self, key: str) -> None:
        """What must not be there."""
        value = self.values.get(key)
        if value:
            raise ModelError(f"{self.name}.{key}={_shown(value)} is not supported")


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern out of a file: one that repeats a group, or repeats anything often, could take for ever to match."""
    repeats = len(re.findall(r"[*+]|\{\d*,", pattern))
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS or re.search(r"\)[*+{]|\\[1-9]|\(\?[^:]", pattern):
        raise ModelError(f"the pattern {pattern[:80]!r} in quantization_config could take long to match")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"the pattern {pattern[:80]!r} in quantization_config is damaged: {error}") from error
