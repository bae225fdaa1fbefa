"""Routers and experts as native code takes them: for plans, and one at a time.

Letters in shapes: T tokens, K experts of a token, X experts of the model, E hidden size. Knows nothing about layers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.mirrors import ExpertsStruct, LinearStruct, Op, RoutingStruct
from pagemill.model.kernels.routing import Routing
from pagemill.model.kernels.run_operations import run_operations

ROUTE = 15
EXPERTS = 16
"""Kinds of operations of a plan."""
NO_BUFFER = -1


@dataclass(frozen=True, slots=True)
class NativeRouting:
    """How a router chooses experts by its logits."""

    struct: RoutingStruct
    kept: tuple[Tensor | None, Tensor | None]
    """Whose addresses the struct holds."""

    @staticmethod
    def of(
        routing: Routing, num_experts: int, correction: Tensor | None, factors: Tensor | None = None
    ) -> "NativeRouting":
        """`correction`: [X] float32, added to scores for choosing; `factors`: [X] float32, of weights at last."""
        kept = tuple(None if given is None else given.contiguous() for given in (correction, factors))
        struct = RoutingStruct(
            num_experts,
            routing.top_k,
            routing.sigmoid,
            routing.renormalize,
            routing.num_groups,
            routing.top_groups,
            routing.group_by_two,
            routing.scale,
            *(None if given is None else given.data_ptr() for given in kept),
        )
        return NativeRouting(struct, (kept[0], kept[1]))

    @property
    def width(self) -> int:
        """Elements of a row of what is chosen, float32."""
        return 2 * int(self.struct.top_k)

    def operation(self, logits: int, out: int) -> Op:
        """For a plan with these buffers."""
        address = ctypes.addressof(self.struct)
        return Op(kind=ROUTE, input=logits, out=out, residual_in=NO_BUFFER, residual_out=NO_BUFFER, routing=address)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, X] float32 -> (experts [T, K] int32, weights [T, K] float32)."""
        given = logits.contiguous()
        routed = torch.empty(len(given), self.width)
        run_operations([self.operation(0, 1)], [given, routed])
        chosen, weights = routed.chunk(2, dim=1)
        return chosen.view(torch.int32), weights


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """The experts of a layer: of each a linear layer with its gate, and one back."""

    struct: ExpertsStruct
    kept: tuple[object, ...]
    """What the struct has addresses of."""

    @staticmethod
    def of(
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        first: int,
        top_k: int,
        clamp: tuple[float, float] | None = None,
        weighs_inputs: bool = False,
    ) -> "NativeExperts":
        """`first`: the number that routers have for the first one. Those of one side have equal sizes. `clamp`: as
        `ExpertForm` has it; then weights have no gate. `weighs_inputs`: whether a token's weight multiplies what an
        expert gets, instead of what it gives."""
        ups, downs = ((LinearStruct * len(layers))(*(layer.struct for layer in layers)) for layers in (gate_up, down))
        inner = gate_up[0].out_features
        struct = ExpertsStruct(
            ctypes.addressof(ups),
            ctypes.addressof(downs),
            len(ups),
            first,
            top_k,
            inner if clamp is None else inner // 2,
            clamp is not None,
            *(clamp or (0.0, 0.0)),
            weighs_inputs,
        )
        return NativeExperts(struct, (ups, downs, tuple(gate_up), tuple(down)))

    def operation(self, source: int, routed: int, out: int) -> Op:
        """For a plan with these buffers."""
        address = ctypes.addressof(self.struct)
        return Op(kind=EXPERTS, input=source, out=out, residual_in=routed, residual_out=NO_BUFFER, experts=address)

    def apply(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, E] bfloat16, experts [T, K] int32, their weights [T, K] float32 -> [T, E]: the weighted sums of those
        that are here."""
        given = x.contiguous()
        routed = torch.cat([chosen.contiguous().view(torch.float32), weights], dim=1)
        out = torch.empty_like(given)
        run_operations([self.operation(0, 1, 2)], [given, routed, out])
        return out
