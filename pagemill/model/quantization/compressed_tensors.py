"""Checkpoints of compressed-tensors: integers of 2 to 8 bits, 8-bit floats, NVFP4, MXFP4 and MXFP8, layer by layer.

Knows no model, and not how a device computes them.
"""

from typing import Any

import torch

from pagemill.errors import ModelError
from pagemill.log import get_logger
from pagemill.model.loading.packed_weight import Inputs
from pagemill.model.quantization.compressed_layouts import PackedFloats, PackedIntegers, PlainNumbers, Scheme
from pagemill.model.quantization.fields import MAX_PATTERNS, Fields, Names, check_steps
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest, Role
from pagemill.model.quantization.scale_grid import OUTPUT, TENSOR, ScaleGrid
from pagemill.utils.text import shown

logger = get_logger(__name__)

INTEGERS = "pack-quantized"
PLAIN_INTEGERS = "int-quantized"
PLAIN_FLOATS = "float-quantized"
PLAIN = "naive-quantized"
NVFP4 = "nvfp4-pack-quantized"
MXFP4 = "mxfp4-pack-quantized"
MXFP8 = "mxfp8-quantized"
MIXED = "mixed-precision"
"""Each group has a format of its own."""
FORMATS = (INTEGERS, PLAIN_INTEGERS, PLAIN_FLOATS, PLAIN, NVFP4, MXFP4, MXFP8)
CLASSES = {Role.LINEAR: "Linear", Role.HEAD: "Linear", Role.ROUTER: "Linear", Role.EMBEDDING: "Embedding"}
"""What a checkpoint calls the classes of layers; of others there are only floats."""
ORDERED = {None: False, "weight": False, "static": False, "group": True, "dynamic": True}
"""actorder -> whether each input says which group it belongs to (weight_g_idx)."""
_MAX_GROUPS = 100


class CompressedTensors(Quantization):
    """Each layer as the first group says that names it, or else names its class; those to be ignored are floats."""

    def __init__(self, groups: list[tuple[list[str], QuantMethod]], ignore: list[str], computing: QuantMethod) -> None:
        """`groups`: targets and method of each. Targets are names, classes, or patterns of names after `re:`. Raises
        ModelError for a pattern that is damaged, or could take long."""
        self._ignored = Names(ignore)
        self._groups = [(Names(targets), method) for targets, method in groups]
        self._computing = computing
        listed = (self._ignored, *(names for names, _ in self._groups))
        num_patterns = sum(len(names.patterns) for names in listed)
        if len(groups) > _MAX_GROUPS or num_patterns > MAX_PATTERNS:
            raise ModelError(
                f"quantization_config has {len(groups)} groups and {num_patterns} patterns; at most {_MAX_GROUPS} and "
                f"{MAX_PATTERNS} are read"
            )
        check_steps(listed)

    def method(self, module: str, role: Role) -> QuantMethod:
        kind = CLASSES.get(role)
        if kind is None or self._ignored.has(module) or kind in self._ignored.exact:
            return self._computing
        for names, method in self._groups:
            if names.has(module):
                return method
        return next((method for names, method in self._groups if kind in names.exact), self._computing)


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
    config.choose("quantization_status", (None, "compressed", "frozen"))  # which older files say of the same
    groups = config.inside("config_groups")
    methods = [
        (group.strings("targets"), _method(group, config, computing))
        for group in (groups.inside(name) for name in groups.values)
    ]
    if not methods:
        raise ModelError("quantization_config.config_groups has no group")
    if not (computing.takes_packed or request.dequantize):
        logger.warning(
            "the checkpoint's weights are dequantized to %s: on a CPU, integers are multiplied with the native kernels "
            "and dtype=bfloat16 only",
            str(request.dtype)[6:],
        )
    return CompressedTensors(methods, config.strings("ignore"), computing)


def _method(group: Fields, config: Fields, computing: QuantMethod) -> QuantMethod:
    """Raises ModelError for one that is not supported."""
    named = group if group.get("format", str) else config
    format_name = str(named.choose("format", FORMATS))
    group.refuse("output_activations")
    weights = group.inside("weights")
    kind = str(weights.choose("type", ("int", "float", None)) or "int")
    weights.choose("dynamic", (False, None))
    inputs = _inputs(group)
    if format_name in (NVFP4, MXFP4):
        return PackedFloats(_fp4_scheme(weights, format_name, inputs), computing)
    bits = int(weights.choose("num_bits", (2, 3, 4, 5, 6, 7, 8) if format_name == INTEGERS else (8,)))
    symmetric = weights.choose("symmetric", (True, False, None)) is not False
    if format_name == INTEGERS:
        weights.choose("type", ("int", None))
        grid = _grid(weights, ("group", "channel", "tensor", None))
        ordered = _ordered(weights)
        return PackedIntegers(Scheme(bits, grid, symmetric, ordered and grid.columns is not None, inputs), computing)
    allowed = {PLAIN_INTEGERS: ("int", None), PLAIN: ("int", "float", None)}.get(format_name, ("float",))
    weights.choose("type", allowed)
    weights.choose("actorder", (None, False, "weight", "static"))
    strategies = ("group",) if format_name == MXFP8 else ("tensor", "channel", "group", "block", None)
    scheme = Scheme(bits, _grid(weights, strategies), symmetric, False, inputs, powers_of_two=format_name == MXFP8)
    return PlainNumbers(scheme, torch.float8_e4m3fn if kind == "float" else torch.int8, computing)


def _fp4_scheme(weights: Fields, format_name: str, inputs: Inputs) -> Scheme:
    weights.choose("type", ("float",))
    weights.choose("num_bits", (4,))
    weights.choose("symmetric", (True, None))
    weights.choose("strategy", ("tensor_group",) if format_name == NVFP4 else ("group",))
    size = int(weights.choose("group_size", (16,) if format_name == NVFP4 else (32,)))
    of_powers = format_name == MXFP4
    return Scheme(4, ScaleGrid(1, size), inputs=inputs, powers_of_two=of_powers, global_scale=not of_powers)


def _grid(weights: Fields, strategies: tuple[str | None, ...]) -> ScaleGrid:
    strategy = weights.choose("strategy", strategies)
    if strategy == "tensor":
        return TENSOR
    if strategy == "block":
        structure = weights.get("block_structure", list) or []
        sizes = [size for size in structure if isinstance(size, int) and not isinstance(size, bool) and size > 0]
        if len(structure) != 2 or len(sizes) != 2:
            raise ModelError(f"{weights.name}.block_structure={shown(structure)} is not two positive numbers")
        return ScaleGrid(sizes[0], sizes[1])
    if strategy == "channel" or (strategy is None and weights.values.get("group_size") is None):
        return OUTPUT
    return ScaleGrid(1, weights.size("group_size"))


def _ordered(weights: Fields) -> bool:
    order = weights.get("actorder", (str, bool))
    ordered = order if isinstance(order, bool) else ORDERED.get(order)
    if ordered is None:
        raise ModelError(f"{weights.name}.actorder={order!r} is not one of group, weight")
    return bool(ordered)


def _inputs(group: Fields) -> Inputs:
    """What inputs are to be multiplied as; of 4 bits, as floats: nothing here computes that."""
    inputs: dict[str, Any] | None = group.get("input_activations", dict)
    if not inputs:
        return Inputs.FLOATS
    fields = group.inside("input_activations")
    bits = fields.choose("num_bits", (4, 8))
    kind = fields.choose("type", ("int", "float", None)) or "int"
    if bits == 4:
        return Inputs.FLOATS
    return Inputs.INT8 if kind == "int" else Inputs.FP8
