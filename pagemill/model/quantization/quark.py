"""Checkpoints of AMD's Quark: 8-bit floats and integers with a scale per weight or output, and MXFP4.

Knows no model. Scales of inputs are not used: where inputs are multiplied in 8 bits, each token finds its own.
"""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

import torch

from pagemill.errors import ModelError
from pagemill.model.loading.packed_weight import Inputs
from pagemill.model.loading.stored import StoredTensor
from pagemill.model.quantization.compressed_layouts import PackedFloats, PlainNumbers, Scheme
from pagemill.model.quantization.fields import MAX_PATTERNS, Fields, Names, check_steps
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest, Role
from pagemill.model.quantization.scale_grid import OUTPUT, TENSOR, ScaleGrid

MX_GROUP: Final = 32
_GRIDS: Final = {"per_tensor": TENSOR, "per_channel": OUTPUT}
_INPUTS: Final = {"fp8_e4m3": Inputs.FP8, "int8": Inputs.INT8}
"""Inputs of other types are multiplied as floats: nothing here computes 4 bits of them."""
_MAX_STARS = 8


class QuarkNumbers(PlainNumbers):
    """Its zero points, if the file has any, are 0."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype, computing: QuantMethod) -> None:
        super().__init__(scheme, dtype, computing)
        self._grid = scheme.grid

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        zeros = self._grid.stored("weight_zero_point", shape, (torch.int8,))
        return (*super().tensors(shape), replace(zeros, unused=True, zeros=True))


class Quark(Quantization):
    """By name, as the first pattern says that fits, or else as for all. Embeddings and the output head are floats."""

    def __init__(
        self, usual: QuantMethod, layers: list[tuple[str, QuantMethod]], excluded: list[str], floats: QuantMethod
    ) -> None:
        """`layers`: patterns with *, and what fits them. `excluded`: layers that are floats: names, patterns with *, or
        regular expressions after `re:`. Raises ModelError for more than are read, or that could take long."""
        self._usual = usual
        self._floats = floats
        self._layers = layers
        self._stars = [name for name in excluded if "*" in name and not name.startswith("re:")]
        self._names = Names([name for name in excluded if name not in self._stars])
        stars = [*self._stars, *(name for name, _ in layers)]
        if len(stars) + len(self._names.patterns) > MAX_PATTERNS or any(name.count("*") > _MAX_STARS for name in stars):
            raise ModelError(
                f"quantization_config has {len(stars) + len(self._names.patterns)} patterns; at most {MAX_PATTERNS}, "
                f"with {_MAX_STARS} * in each, are read"
            )
        check_steps([self._names])

    def method(self, module: str, role: Role) -> QuantMethod:
        """How the weight of a layer of that name is stored and computed."""
        is_excluded = self._names.has(module) or any(fnmatchcase(module, name) for name in self._stars)
        if role not in (Role.LINEAR, Role.ROUTER) or is_excluded:
            return self._floats
        return next((method for name, method in self._layers if fnmatchcase(module, name)), self._usual)


def _method(layer: Fields, computing: QuantMethod) -> QuantMethod:
    """Raises ModelError for one that is not supported."""
    weight = layer.inside("weight")
    if not weight.values:
        return computing
    inputs = _INPUTS.get(str(layer.inside("input_tensors").get("dtype", str)), Inputs.FLOATS)
    weight.choose("is_dynamic", (None, False))
    weight.choose("symmetric", (None, True))
    dtype = weight.choose("dtype", ("fp8_e4m3", "int8", "fp4"))
    if dtype == "fp4":
        weight.choose("qscheme", ("per_group",))
        weight.choose("group_size", (MX_GROUP,))
        weight.choose("scale_format", ("e8m0",))
        scheme = Scheme(4, ScaleGrid(1, MX_GROUP), inputs=inputs, powers_of_two=True)
        return PackedFloats(scheme, computing, kind="weight")
    scheme = Scheme(8, _GRIDS[weight.choose("qscheme", tuple(_GRIDS))], inputs=inputs)
    return QuarkNumbers(scheme, torch.int8 if dtype == "int8" else torch.float8_e4m3fn, computing)


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    computing = as_stored(request)
    config = Fields("quantization_config", request.config)
    config.refuse("layer_type_quant_config")
    usual = config.inside("global_quant_config")
    if not usual.values:
        raise ModelError("quantization_config.global_quant_config is missing")
    own = config.inside("layer_quant_config")
    layers = [(name, _method(own.inside(name), computing)) for name in own.values]
    return Quark(_method(usual, computing), layers, config.strings("exclude"), computing)
