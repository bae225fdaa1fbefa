"""Checkpoints of AutoRound (Intel; vLLM calls them inc): layers in GPTQ's layout or AWQ's, each with its own bits.

Knows no model. (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", 2023.)
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from pagemill.errors import ModelError
from pagemill.model.quantization.awq import AwqWeights
from pagemill.model.quantization.fields import MAX_PATTERNS, Fields, Names, check_steps
from pagemill.model.quantization.gptq import GptqLayout, GptqWeights
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest, Role
from pagemill.utils.text import shown

GPTQ: Final = "auto_round:auto_gptq"
AWQ: Final = "auto_round:auto_awq"
FLOAT_BITS: Final = 16
"""From so many bits on, a layer is not quantized."""
_MAX_LAYERS = 20_000
_OWN = ("bits", "group_size", "data_type")
_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")


class AutoRound(Quantization):
    """By name. Embeddings, routers and experts in one tensor are floats; the output head is too, unless it is named."""

    def __init__(self, config: Fields, floats: QuantMethod) -> None:
        """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
        self._floats = floats
        self._is_gptq = config.choose("packing_format", (None, GPTQ, AWQ)) != AWQ
        self._blocks = tuple(_blocks(config))
        self._usual = self._of(config)
        own = config.inside("extra_config")
        if len(own.values) > _MAX_LAYERS:
            raise ModelError(f"{own.name} names {len(own.values)} layers; at most {_MAX_LAYERS} are read")
        self._layers = {name: self._of(_laid_over(config, own, name)) for name in own.values}
        patterns = [name for name in own.values if _PATTERN.search(name)]
        if len(patterns) > MAX_PATTERNS:
            raise ModelError(f"{own.name} has {len(patterns)} patterns; at most {MAX_PATTERNS} are read")
        # Patterns may begin anywhere in a name.
        self._patterns = [(Names([f"re:.*{name.removeprefix('.*').removeprefix('^')}"]), name) for name in patterns]
        check_steps([names for names, _ in self._patterns])

    def method(self, module: str, role: Role) -> QuantMethod:
        """How the weight of a layer of that name is stored and computed."""
        if role in (Role.EMBEDDING, Role.ROUTER, Role.STACKED):
            return self._floats
        named = self._layers.get(module)
        if named is None:
            named = next((self._layers[name] for names, name in self._patterns if names.has(module)), None)
        if named is not None:
            return named
        is_meant = not self._blocks or module.startswith(self._blocks)
        return self._usual if is_meant and role is Role.LINEAR else self._floats

    def _of(self, config: Fields) -> QuantMethod:
        """Of a layer, by what is said of it."""
        bits = config.positive("bits")
        if bits >= FLOAT_BITS:
            return self._floats
        config.choose("data_type", (None, "int"))
        size = config.size("group_size")
        if not self._is_gptq:
            config.choose("bits", (4,))
            return AwqWeights(size, self._floats)
        config.choose("bits", (2, 3, 4, 8))
        return GptqWeights(GptqLayout(bits, size, ordered=False, zero_offset=1), self._floats)


def _laid_over(config: Fields, own: Fields, name: str) -> Fields:
    """What is said of a layer, and of all where nothing is said of it."""
    usual = {key: config.values[key] for key in _OWN if key in config.values}
    said: Mapping[str, Any] = own.inside(name).values
    if said.get("bits", 0) in (FLOAT_BITS, 2 * FLOAT_BITS):
        usual = {}
    return Fields(f"{own.name}.{name}", {**usual, **said})


def _blocks(config: Fields) -> list[str]:
    """Beginnings of the names of layers that are quantized; none: all are."""
    key = next((key for key in ("block_name_to_quantize", "to_quant_block_names") if config.values.get(key)), None)
    if key is None:
        return []
    value = config.values[key]
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{config.name}.{key}={shown(value)} is not a list of names")
    return names


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    config = Fields("quantization_config", request.config)
    config.choose("act_bits", (None, FLOAT_BITS, 2 * FLOAT_BITS))
    return AutoRound(config, as_stored(request))
