"""Rotary position embedding (Su et al., 2021), in its half-split form, with the usual scalings of frequencies."""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from pagemill.errors import ConfigError, ModelError
from pagemill.model.kernels.ops import gather_pair

MAX_TABLE_BYTES = 4 << 30
"""Of cos and sin together: 8 million positions of heads of 128 in bfloat16."""
_PART = 1 << 17
THETA: Final = "rope_theta"
_DEFAULT_THETA: Final = 10_000.0


class Rotary:
    """cos and sin for every position, in the model's type, made once per distinct setting."""

    def __init__(self, inv_freq: Tensor, max_position: int, dtype: torch.dtype, attention_factor: float = 1.0) -> None:
        """Raises ConfigError for more positions than MAX_TABLE_BYTES hold."""
        size = 2 * len(inv_freq)
        most = MAX_TABLE_BYTES // (2 * size * dtype.itemsize)
        if max_position > most:
            raise ConfigError(
                f"max_model_len={max_position} is not allowed: rotary tables of so many positions take more than "
                f"{MAX_TABLE_BYTES >> 30} GiB; set --max-model-len to {most} or less"
            )
        self.cos = torch.empty(max_position, size, dtype=dtype, device=inv_freq.device)
        """[N, D] the second half repeats the first."""
        self.sin = torch.empty_like(self.cos)
        for begin in range(0, max_position, _PART):  # in parts: numbers between are four times as large
            part = slice(begin, min(begin + _PART, max_position))
            angles = torch.outer(torch.arange(part.start, part.stop, dtype=torch.float32), inv_freq)
            table = torch.cat([angles, angles], dim=-1)
            self.cos[part] = (table.cos() * attention_factor).to(dtype)
            self.sin[part] = (table.sin() * attention_factor).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] positions -> cos, sin, each [T, D], for all heads. Looked up once per step and setting."""
        return gather_pair(self.cos, self.sin, positions)


def rope_settings(
    config: Mapping[str, Any], layer_type: str | None = None, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Rotary settings from a config, in the old form (rope_theta, rope_scaling) or the new (rope_parameters, which
    may be per layer type). `defaults`: a model's own, where the config says nothing."""
    own = defaults or {}
    found = config.get("rope_parameters")
    if found is None:
        found = config.get("rope_scaling", own.get("rope_scaling")) or {}
    elif layer_type is not None and layer_type in found:
        found = found[layer_type]
    settings = dict(found)
    for name in (THETA, "partial_rotary_factor", "original_max_position_embeddings", "max_position_embeddings"):
        settings[name] = settings.get(name) or config.get(name) or own.get(name)
    settings[THETA] = settings[THETA] or _DEFAULT_THETA
    kind = settings.get("rope_type") or settings.pop("type", None) or "default"
    settings["rope_type"] = "longrope" if kind == "su" else kind
    return settings


def turned_size(head_size: int, settings: Mapping[str, Any]) -> int:
    """So many of a head's elements are turned: all, but for a partial_rotary_factor; of the proportional kind all, most
    of them by nothing. Raises ModelError where that is no even number."""
    if settings.get("rope_type") == "proportional":
        return head_size
    part = settings.get("partial_rotary_factor") or 1.0
    size = int(head_size * part)
    if size < 2 or size % 2:
        raise ModelError(
            f"partial_rotary_factor={part} turns {size} elements of a head: it is to be an even number from 2"
        )
    return size


def make_rotary(settings: Mapping[str, Any], head_size: int, max_position: int, dtype: torch.dtype) -> Rotary:
    """The tables for one setting, of `head_size` elements that are turned. Raises ModelError for a scaling that is not
    supported.

    Some scalings change with the length of a sequence. A cache holds keys that are turned already, so those have the
    frequencies of sequences of `max_position` tokens, whatever a sequence's length.
    """
    kind = settings["rope_type"]
    inv_freq: Tensor = 1.0 / settings["rope_theta"] ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    if kind == "default":
        return Rotary(inv_freq, max_position, dtype)
    if kind == "linear":
        return Rotary(inv_freq / settings["factor"], max_position, dtype)
    if kind == "llama3":
        return Rotary(_llama3(inv_freq, settings), max_position, dtype)
    if kind == "yarn":
        factor = settings.get("attention_factor") or _yarn_factor(settings)
        return Rotary(_yarn(inv_freq, settings, head_size), max_position, dtype, factor)
    if kind == "dynamic":
        return Rotary(_dynamic(settings, head_size, max_position), max_position, dtype)
    if kind == "proportional":
        return Rotary(_proportional(inv_freq, settings), max_position, dtype)
    if kind == "longrope":
        factors, magnitude = _longrope(settings, head_size, max_position)
        return Rotary(inv_freq / factors, max_position, dtype, magnitude)
    raise ModelError(
        f"rope type {kind!r} is not supported; known: default, dynamic, linear, llama3, longrope, proportional, yarn"
    )


def _proportional(inv_freq: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """The frequencies of the whole head, of which only the first are not 0 (Gemma 4)."""
    part = settings.get("partial_rotary_factor") or 1.0
    kept = int(part * 2 * len(inv_freq) // 2)
    scaled = inv_freq / (settings.get("factor") or 1.0)
    scaled[kept:] = 0
    return scaled


def _dynamic(settings: Mapping[str, Any], head_size: int, max_position: int) -> Tensor:
    """Dynamic NTK scaling: a base that grows with the length, beyond that of the training."""
    original = settings.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    factor = settings["factor"]
    stretched = factor * max(max_position, original) / original - (factor - 1)
    base = settings["rope_theta"] * stretched ** (head_size / max(head_size - 2, 1))
    inv_freq: Tensor = 1.0 / base ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    return inv_freq


def _longrope(settings: Mapping[str, Any], head_size: int, max_position: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024): a divisor of each frequency, others beyond the length of the training, and what cos
    and sin are multiplied by. Raises ModelError for another number of divisors."""
    original = settings.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    name = "long_factor" if max_position > original else "short_factor"
    factors = torch.tensor(settings[name], dtype=torch.float32)
    if len(factors) != head_size // 2:
        raise ModelError(f"rope_scaling.{name} has {len(factors)} numbers for {head_size // 2} pairs of elements")
    magnitude = settings.get("attention_factor")
    if magnitude is None:
        most = settings.get("max_position_embeddings")
        stretch = settings.get("factor") or (most / original if most else 1.0)
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return factors, magnitude


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by when positions are stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_factor(settings: Mapping[str, Any]) -> float:
    """On cos and sin. With mscale and mscale_all_dim, the part that is not on the whole of the query (DeepSeek)."""
    factor = settings["factor"]
    part = settings.get("mscale")
    whole = settings.get("mscale_all_dim")
    if part and whole:
        return yarn_magnitude(factor, part) / yarn_magnitude(factor, whole)
    return yarn_magnitude(factor)


def _llama3(inv_freq: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long waves are stretched by factor, short ones kept, those between interpolated."""
    low = settings["low_freq_factor"]
    high = settings["high_freq_factor"]
    original = settings["original_max_position_embeddings"]
    factor = settings["factor"]
    turns = original * inv_freq / (2 * math.pi)
    # Llama 4's bounds are equal: then nothing is between them.
    smooth = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).float()
    scaled: Tensor = inv_freq * (smooth + (1 - smooth) / factor)
    return scaled


def _yarn(inv_freq: Tensor, settings: Mapping[str, Any], head_size: int) -> Tensor:
    """YaRN (Peng et al., 2023): interpolate dimensions that turn less than beta_slow times over the original
    length, keep those that turn more than beta_fast times, ramp between."""
    theta = settings["rope_theta"]
    original = settings["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(settings.get("beta_fast") or 32)
    high = dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_size - 1)
    ramp = ((torch.arange(head_size // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled: Tensor = inv_freq * (1 - ramp) + inv_freq / settings["factor"] * ramp
    return scaled
