"""Make all pages equally large: larger blocks of tokens, and padded states. Pure functions.

Knows nothing about groups, or about how much memory there is.
"""

import dataclasses
import math
from collections.abc import Mapping

from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import TOKENS_PER_STATE, FullAttentionSpec, KVCacheSpec, MambaSpec
from pagemill.utils.math import ceil_div, round_up


def equal_pages(specs: Mapping[str, KVCacheSpec], state_tokens: int | None = None) -> dict[str, KVCacheSpec]:
    """The specs with larger blocks where pages are smaller, so that all pages have the same size.

    Blocks of attention layers grow until a page holds the largest state, and states are padded to it. A state stands
    for as many tokens as a block then has, or for `state_tokens` (one state is enough for a request that long), if
    that is given. Raises ConfigError when the page of an attention layer does not divide the largest of them.
    """
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    attention = equal_attention_pages({name: spec for name, spec in specs.items() if name not in states})
    if not states:
        return attention
    page_bytes = max(spec.state_bytes() for spec in states.values())
    if attention:
        small = next(iter(attention.values())).page_bytes()
        factor = ceil_div(page_bytes, small)
        page_bytes = small * factor
        attention = {name: _enlarged(spec, factor) for name, spec in attention.items()}
        block_size = math.lcm(*(spec.block_size for spec in attention.values()))
        least = block_size
    else:
        block_size = math.lcm(*(spec.block_size for spec in states.values()))
        least = TOKENS_PER_STATE
    tokens = round_up(state_tokens or least, block_size)
    return attention | {
        name: dataclasses.replace(spec, block_size=tokens, padded_bytes=page_bytes) for name, spec in states.items()
    }


def equal_attention_pages(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """`equal_pages` for specs whose pages grow with their blocks."""
    page_bytes = _largest_page(specs)
    equal = {}
    for name, spec in specs.items():
        factor, rest = divmod(page_bytes, spec.page_bytes())
        if rest:
            raise ConfigError(
                f"layer {name!r} keeps {spec.page_bytes()} bytes per block, which does not divide the {page_bytes} "
                f"bytes of the largest; {_remedy(specs)}"
            )
        equal[name] = _enlarged(spec, factor)
    return equal


def _largest_page(specs: Mapping[str, KVCacheSpec]) -> int:
    return max((spec.page_bytes() for spec in specs.values()), default=0)


def _remedy(specs: Mapping[str, KVCacheSpec]) -> str:
    """What can be done about pages that do not divide the largest."""
    plain = {name: _without_scales(spec) for name, spec in specs.items()}
    page_bytes = _largest_page(plain)
    if plain != specs and not any(page_bytes % spec.page_bytes() for spec in plain.values()):
        return (
            "heads of several sizes do not fit kv_cache_dtype=int8, where each key and value has a scale beside it: "
            "leave out --kv-cache-dtype"
        )
    return "such a model is not supported"


def _without_scales(spec: KVCacheSpec) -> KVCacheSpec:
    """The same in a type of as many bytes whose keys and values have no scales of their own."""
    if isinstance(spec, FullAttentionSpec) and spec.row_elements() > spec.head_size:
        return dataclasses.replace(spec, dtype="float8_e4m3fn")
    return spec


def _enlarged(spec: KVCacheSpec, factor: int) -> KVCacheSpec:
    return dataclasses.replace(spec, block_size=spec.block_size * factor)
