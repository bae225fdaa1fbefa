"""`PanelWeight`: any weight in the panels of the native kernels. Knows no format by name."""

import torch
from torch import Tensor

from pagemill.model.kernels.linear import GELU_TANH, SILU, PackedLinear, PanelForm, linear, weight_rows, with_bias
from pagemill.model.kernels.pack_linear import NO_GATE
from pagemill.model.quantization.interface import LinearWeight

GATES = {None: NO_GATE, "silu": SILU, "gelu_tanh": GELU_TANH}
"""Names of gated activations, as `QuantMethod.prepare` has them."""
GATE_NAMES = {number: name for name, number in GATES.items()}


class PanelWeight(LinearWeight):
    """Panels for the native kernels: read at memory bandwidth for one row, and faster than oneDNN for many; a row's
    result does not depend on the others."""

    def __init__(self, packed: PackedLinear) -> None:
        self.gives_rows = packed.struct.gate == NO_GATE
        self._packed = packed
        self._biased: PackedLinear | None = None
        self.gate = GATE_NAMES[packed.struct.gate]
        # Compilers read no structures of C.
        self._form = PanelForm(packed.struct.format, packed.struct.rows, packed.struct.cols, packed.struct.gate)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            return self._traced(x, bias, torch.bfloat16)
        return linear(x, self.native(bias))

    def logits(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._traced(x, None, torch.float32)
        return linear(x, self._packed, torch.float32)

    def rows(self, indices: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            from pagemill.model.kernels import torch_ops  # deferred: registering takes time, and only compilers ask

            return torch_ops.traced_rows(indices, self._packed.tensors[0], self._form)
        return weight_rows(indices, self._packed)

    def native(self, bias: Tensor | None) -> PackedLinear:
        if bias is None:
            return self._packed
        if self._biased is None:
            self._biased = with_bias(self._packed, bias)
        return self._biased

    def _traced(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        from pagemill.model.kernels import torch_ops  # deferred, as above

        return torch_ops.traced_linear(x, self._packed.tensors[0], bias, self._form, out_dtype)
