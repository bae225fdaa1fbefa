"""How tensors of a checkpoint are made of what GGUF files have in parts, in other places or by other formulas.

Letters in shapes: X experts, F an expert's inside, E hidden size, H heads, D head size, C channels, K a convolution's
length, R the size of latent vectors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pagemill.artifacts.gguf_family import Piece
from pagemill.errors import ModelError
from pagemill.utils.text import shown_name

Make = Callable[[Mapping[str, Any], Sequence[Tensor]], Tensor]
"""(config, the file's tensors) -> the checkpoint's."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one tensor is made."""

    make: Make
    of_rows: bool = False
    """Whether rows change places and nothing else, so that quantized ones stay as they are."""
    rounds: bool = False
    """Whether values may be rounded to the model's type before they change places."""


def made_shape(piece: Piece, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of what is made, before anything is read. Raises ModelError for parts that do not fit together."""
    parts = [torch.empty(tensor.shape, device="meta") for tensor in piece.tensors]
    try:
        return tuple(FORMS[str(piece.form)].make(config, parts).shape)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        shapes = ", ".join(f"{shown_name(tensor.name)} of shape {tensor.shape}" for tensor in piece.tensors)
        raise ModelError(f"{shapes}: no {shown_name(piece.name)} can be made of that") from error


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, key heads, size of a head."""
    heads = config["num_attention_heads"]
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads


def _qkv(config: Mapping[str, Any], joined: Tensor) -> tuple[Tensor, ...]:
    heads, kv_heads, size = _heads(config)
    return torch.split(joined, [heads * size, kv_heads * size, kv_heads * size])


def _grouped_rows(config: Mapping[str, Any], parts: Sequence[Tensor]) -> Tensor:
    """All queries, then keys, then values, [rows, ...] -> for each key head its queries, that, and its value."""
    _, kv_heads, _ = _heads(config)
    (joined,) = parts
    groups = [part.reshape(kv_heads, -1, *joined.shape[1:]) for part in _qkv(config, joined)]
    return torch.cat(groups, dim=1).reshape(joined.shape)


def _delta_rows(config: Mapping[str, Any], parts: Sequence[Tensor]) -> Tensor:
    """All queries, keys and values, and gates, [rows, E] -> for each key head its query, that, its values and gates."""
    joined, gates = parts
    heads = config["linear_num_key_heads"]
    keys = heads * config["linear_key_head_dim"]
    split = (*torch.split(joined, [keys, keys, joined.shape[0] - 2 * keys]), gates)
    return torch.cat([part.reshape(heads, -1, *part.shape[1:]) for part in split], dim=1).flatten(0, 1)


def _latent_heads(config: Mapping[str, Any], parts: Sequence[Tensor]) -> Tensor:
    """[H, R, key], [H, value, R] -> [H * (key + value), R]."""
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def _paired_experts(config: Mapping[str, Any], parts: Sequence[Tensor]) -> Tensor:
    """Gates and ups, [X, F, E] each -> [X, E, 2 * F], each gate beside its up."""
    return torch.stack(list(parts), dim=2).flatten(1, 2).transpose(1, 2)


FORMS: Final[dict[str, Form]] = {
    "q_rows": Form(lambda config, parts: _qkv(config, parts[0])[0], of_rows=True),
    "k_rows": Form(lambda config, parts: _qkv(config, parts[0])[1], of_rows=True),
    "v_rows": Form(lambda config, parts: _qkv(config, parts[0])[2], of_rows=True),
    "grouped_rows": Form(_grouped_rows, of_rows=True),
    "delta_rows": Form(_delta_rows, of_rows=True),
    "joined_rows": Form(lambda config, parts: torch.cat(list(parts)), of_rows=True),
    "latent_heads": Form(_latent_heads, rounds=True),
    "paired_experts": Form(_paired_experts, rounds=True),
    "paired_biases": Form(lambda config, parts: torch.stack(list(parts), dim=2).flatten(1)),
    "stacked_experts": Form(lambda config, parts: torch.cat(list(parts), dim=1), rounds=True),
    "joined_experts": Form(lambda config, parts: torch.cat(list(parts), dim=1).transpose(1, 2), rounds=True),
    "turned_experts": Form(lambda config, parts: parts[0].transpose(1, 2), rounds=True),
    "decay": Form(lambda config, parts: (-parts[0]).log()),
    "flat_decay": Form(lambda config, parts: (-parts[0]).log().flatten()),
    "flat": Form(lambda config, parts: parts[0].flatten()),
    "one_row": Form(lambda config, parts: parts[0].reshape(1, -1)),
    "channels": Form(lambda config, parts: parts[0].unsqueeze(1)),
}
"""Name of a form -> how it is made. Of decays, files have -exp of what checkpoints have; of convolutions [C, K] for
[C, 1, K]."""
