"""Attention of a model of transformers, over the paged cache: what its attention modules call, and the layer behind it.

transformers calls attention through a table of functions by name (its AttentionInterface); this file adds one.
"""

from collections.abc import Hashable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.errors import ModelError
from pagemill.messages.kv_spec import KVCacheSpec
from pagemill.model.attention.interface import StepPlanner
from pagemill.model.attention.layer import Attention

NAME: Final = "pagemill"
"""In transformers' tables."""
PLACE: Final = "paged_attention"
"""The attribute of an attention module that has its layer."""
HANDLED: Final = frozenset({"sliding_window", "softcap", "s_aux"})
"""Arguments that a layer's spec has: told once, when the model is tried out."""
HARMLESS: Final = frozenset(
    {
        *("dropout", "is_causal", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("position_ids", "cache_position", "position_embeddings", "logits_to_keep", "cache", "layer_idx"),
        *("output_router_logits", "input_ids", "num_items_in_batch", "implementation", "past_key_values"),
        *("target_dtype", "deterministic"),
    }
)
"""Arguments that change no result here."""


def register() -> None:
    """Add `attend` to transformers' table; again does no harm."""
    from transformers import AttentionInterface  # optional: transformers

    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **other: Any
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] of this step's tokens, of all requests one after
    the other -> [1, T, H, Dv]. The layer's spec has the scale, window and cap."""
    layer = getattr(module, PLACE, None)
    if layer is None:
        raise ModelError(f"{type(module).__name__} attends in a way that it did not when the model was tried out")
    width = layer.spec.head_size
    rows = [_rows(tensor, width) for tensor in (query, key, value)]
    attended: Tensor = layer(*rows)
    return attended[:, :, : value.shape[-1]].unsqueeze(0), None


def _rows(heads: Tensor, width: int) -> Tensor:
    """[1, H, T, D] -> [T, H, width], zeros where D is less."""
    rows = heads[0].transpose(0, 1)
    if rows.shape[-1] < width:
        rows = functional.pad(rows, (0, width - rows.shape[-1]))
    return rows.contiguous()


def unknown(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments of an attention function that may change its result, and that nothing here heeds."""
    return [
        name
        for name, value in arguments.items()
        if name not in HANDLED | HARMLESS and value is not None and value is not False
    ]


class UncapturedAttention:
    """An attention layer in a model that is not to be captured in graphs: what is around it may ask the device for
    numbers, or follow them."""

    def __init__(self, layer: Attention) -> None:
        self.name = layer.name
        self._layer = layer

    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """What the layer keeps."""
        return self._layer.kv_spec(block_size, dtype)

    def bind(self, memory: Tensor, num_blocks: int, spec: KVCacheSpec) -> None:
        """Give the layer its memory."""
        self._layer.bind(memory, num_blocks, spec)

    def planning(self) -> Hashable:
        """As the layer is planned."""
        return self._layer.planning()

    def planner(self, device: torch.device) -> StepPlanner:
        """What plans the steps of this layer and of those with the same backend and spec."""
        return self._layer.planner(device)
