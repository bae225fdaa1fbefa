"""How many parameters a model's files hold, by the headers of the files: no weight is read."""

import math
from pathlib import Path
from typing import Any, Final

from pagemill.artifacts.gguf_file import read_gguf
from pagemill.artifacts.weight_index import names_of_weight_files, safetensors_header
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError

_METADATA: Final = "__metadata__"
_WORD_BITS: Final = 32
_WIDE: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"})
"""Types of which each number is a parameter, unless it scales others."""


def parameter_count(facts: ModelFacts) -> int | None:
    """Numbers that the model has learned; of a quantized one, those that it has when dequantized, without its scales.
    None: the files are not here, cannot be read, or do not say."""
    path = Path(facts.path)
    try:
        if facts.weights_format == "gguf":
            return sum(math.prod(tensor.shape) for tensor in read_gguf(path).tensors.values())
        if facts.weights_format != "safetensors":
            return None
        files = [safetensors_header(path / name) for name in names_of_weight_files(path)]
        bits = _bits(facts.quantization_config)
        counts = [
            _count(name, entry, facts, bits) for header in files for name, entry in header.items() if name != _METADATA
        ]
        return math.floor(sum(counts))
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _count(name: str, entry: dict[str, Any], facts: ModelFacts, bits: int | None) -> float:
    """Parameters in a tensor. Raises ValueError where it is packed and nobody says how."""
    dtype, last = entry["dtype"], name.rpartition(".")[2]
    numbers = int(math.prod(entry["shape"]))
    if facts.quant_method is None:
        return numbers if dtype in _WIDE else 0
    if last in ("qweight", "weight_packed") and dtype == "I32":
        if bits is None:
            raise ValueError(f"{name} is packed, and the quantization_config names no bits")
        return numbers * _WORD_BITS / bits
    if dtype == "U8" and (last in ("weight", "weight_packed") or last.endswith("_blocks")):
        return numbers * 2
    return numbers if dtype in _WIDE and "scale" not in last and last != "SCB" else 0


def _bits(config: dict[str, Any]) -> int | None:
    """Of a packed weight; None: the quantization_config does not say."""
    groups = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    found = [config.get("bits"), config.get("w_bit"), *(weights.get("num_bits") for weights in groups)]
    return next((bits for bits in found if isinstance(bits, int) and 0 < bits <= _WORD_BITS), None)
