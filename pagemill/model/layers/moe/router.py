"""`Router`: chooses the experts of each token. Knows nothing about experts but their number."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.kernels.moe import route
from pagemill.model.kernels.native_experts import NativeRouting
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.weight_reader import WeightReader
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import LayerTensor, WeightPart
from pagemill.model.quantization.interface import Role
from pagemill.model.quantization.unquantized import Unquantized

CORRECTION = "e_score_correction_bias"


class Router(Linear):
    """[T, E] -> chosen experts [T, K] int32 and their weights [T, K] float32.

    It is whole on every rank and never quantized: a wrong expert costs more than its few rows save. With `corrected`,
    the checkpoint has a number per expert that is added to its score when experts are chosen (DeepSeek-V3, 2024).
    """

    def __init__(
        self,
        size: int,
        num_experts: int,
        routing: Routing,
        *,
        ctx: LayerContext,
        corrected: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(size, (num_experts,), bias=bias, ctx=ctx)
        if not 0 < routing.top_k <= num_experts:
            raise ModelError(f"{self.name}: num_experts_per_tok={routing.top_k} is not in 1 to {num_experts} experts")
        if num_experts % routing.num_groups:
            raise ModelError(f"{self.name}: {num_experts} experts cannot be divided into n_group={routing.num_groups}")
        self.routing = routing
        self.correction: Tensor | None = None
        self._corrected = corrected

    def _make_reader(self, parts: Sequence[WeightPart]) -> WeightReader:
        method = self._ctx.method(0, Role.ROUTER)
        held = method if method.holds_routers else Unquantized()
        return WeightReader(self._ctx, parts, Role.ROUTER, held=held)

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        yield from super().checkpoint_tensors()
        if self._corrected:
            yield LayerTensor.whole(CORRECTION, self.shards)

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        if kind == CORRECTION and isinstance(tensor, Tensor):
            self.correction = tensor.to(torch.float32)
        else:
            super().load(kind, shard, tensor)

    def native_routing(self) -> NativeRouting | None:
        """How native code chooses, by the logits that `native` gives; None where it cannot."""
        return NativeRouting.of(self.routing, self.shards[0], self.correction)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(experts, weights) of [T, E]. Logits are float32, whatever x is: near ties are common."""
        logits = self.weight.logits(x)  # type: ignore[union-attr]
        if self.bias is not None:
            logits = logits + self.bias
        return route(logits, self.routing, self.correction)
