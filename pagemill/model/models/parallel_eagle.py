"""P-EAGLE: EAGLE-3 heads that guess all tokens in one pass. What stands for a token that is not known
yet is the same for all: a token of its own, and hidden states that were learnt."""

import dataclasses
from typing import Final

import torch
from torch import Tensor, nn

from pagemill.config.facts import ModelFacts
from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.part import whole
from pagemill.model.loading.stored import LayerTensor, StoredTensor
from pagemill.model.loading.weight_map import Target, WeightMap
from pagemill.model.models.eagle import EAGLE_WEIGHTS, Eagle3Head

_TENSOR: Final = "mask_hidden"


class ParallelNames(WeightMap):
    """Those of EAGLE-3, and `mask_hidden` outside all layers."""

    def target(self, name: str) -> Target | None:
        if name.removeprefix(self.strip_prefix) == _TENSOR:
            return Target(_TENSOR, _TENSOR, 0)
        return super().target(name)

    def source_name(self, target: Target) -> str:
        return _TENSOR if target.layer == _TENSOR else super().source_name(target)


class MaskHidden(nn.Module):
    """What takes the place of the model's hidden states where there are none yet."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = torch.empty(0)
        """[N * E']: of all layers that are read."""
        self._size = size
        self._dtype = dtype

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """One, of one row."""
        shape = (1, 1, self._size)
        stored = StoredTensor(_TENSOR, shape, other_shapes=((1, self._size),))
        return (LayerTensor(stored, 0, whole(_TENSOR, shape)),)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        self.values = tensor.flatten().to(self._dtype)


class ParallelEagle3Head(Eagle3Head):
    """`masked` behind the last known position, and `mask_token`, as often as further tokens are to be guessed."""

    weights = ParallelNames(
        **{field.name: getattr(EAGLE_WEIGHTS, field.name) for field in dataclasses.fields(WeightMap)}
    )

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        super().__init__(facts, max_model_len, ctx)
        self.mask_token = int(self.config["mask_token_id"])

    def make_embeddings(self, ctx: LayerContext) -> None:
        super().make_embeddings(ctx)
        read = int(self.config.get("target_hidden_size") or self.hidden_size)
        count = len(self.config["eagle_aux_hidden_state_layer_ids"])
        self.mask_hidden = MaskHidden(count * read, ctx.dtype)

    def masked(self) -> Tensor:
        """[1, E]: what takes the place of a hidden state that is not known yet."""
        return self.fused(self.mask_hidden.values.unsqueeze(0))
