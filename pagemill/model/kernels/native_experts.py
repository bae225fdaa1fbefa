"""Routers and experts as native code takes them: for plans, and one at a time.

Letters in shapes: T tokens, K experts of a token, X experts of the model, E hidden size. Knows nothing about layers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.mirrors import ExpertsStruct, LinearStruct, Op, RoutingStruct, Run
from pagemill.model.kernels.native import loaded_library
from pagemill.model.kernels.routing import Routing

ROUTE = 15
EXPERTS = 16
"""Kinds of operations of a plan."""
NO_BUFFER = -1


@dataclass(frozen=True, slots=True)
class NativeRouting:
    """How a router chooses experts by its logits."""

    struct: RoutingStruct
    correction: Tensor | None
    """Whose address the struct holds."""

    @staticmethod
    def of(routing: Routing, num_experts: int, correction: Tensor | None) -> "NativeRouting":
        """`correction`: [X] float32, added to scores for choosing."""
        kept = None if correction is None else correction.contiguous()
        struct = RoutingStruct(
            num_experts,
            routing.top_k,
            routing.sigmoid,
            routing.renormalize,
            routing.num_groups,
            routing.top_groups,
            routing.group_by_two,
            routing.scale,
            None if kept is None else kept.data_ptr(),
        )
        return NativeRouting(struct, kept)

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
        _run(self.operation(0, 1), [given, routed])
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
    ) -> "NativeExperts":
        """`first`: the number that routers have for the first one. Those of one side have equal sizes. `clamp`: as
        `ExpertForm` has it; then weights have no gate."""
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
        _run(self.operation(0, 1, 2), [given, routed, out])
        return out


def _run(op: Op, buffers: Sequence[Tensor]) -> None:
    """One operation, on rows of tensors. Raises MemoryError."""
    num_rows = len(buffers[0])
    if not num_rows:
        return
    addresses = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
    widths = (ctypes.c_int64 * len(buffers))(*(buffer.shape[1] for buffer in buffers))
    run = Run(num_tokens=num_rows, buffers=ctypes.addressof(addresses), widths=ctypes.addressof(widths))
    if loaded_library().run_plan(ctypes.addressof(op), 1, ctypes.addressof(run), torch.get_num_threads()):
        raise MemoryError("no memory for the working space of experts")
