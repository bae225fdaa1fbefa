"""`SeparateExperts`: experts as pairs of linear weights, and `StackedExperts`: as two tensors for fused kernels.

Knows neither routers nor ranks.
"""

import torch
from torch import Tensor

from pagemill.model.kernels import moe
from pagemill.model.kernels.native_experts import NativeExperts
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights, LinearWeight, QuantMethod


class SeparateExperts(ExpertWeights):
    """Each expert in the form in which its method holds linear layers; each computes the tokens that chose it.

    A token's result does not depend on the others: experts are added up in float32, in their order. A form with a clamp
    is said before weights are put, its biases before they are applied.
    """

    def __init__(self, method: QuantMethod, sizes: ExpertSizes, gate: str) -> None:
        self._method = method
        self._sizes = sizes
        self._gate = gate
        self.gate_up: dict[int, LinearWeight] = {}
        self.down: dict[int, LinearWeight] = {}
        self._native: dict[tuple[int, int, bool], NativeExperts | None] = {}

    def put_gate_up(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        clamped = self.form is not None and self.form.clamp is not None
        self._native.clear()
        self.gate_up[expert] = self._method.prepare(weight, None if clamped else self._gate)

    def put_down(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        self._native.clear()
        self.down[expert] = self._method.prepare(weight)

    def native(self, first: int, top_k: int, weighs_inputs: bool = False) -> NativeExperts | None:
        form = first, top_k, weighs_inputs
        if form not in self._native:
            self._native[form] = self._made_native(*form)
        return self._native[form]

    def _made_native(self, first: int, top_k: int, weighs_inputs: bool) -> NativeExperts | None:
        clamp = None if self.form is None else self.form.clamp
        if any((weight.gate is None) != (clamp is not None) for weight in self.gate_up.values()):
            return None
        gate_up, down = [], []
        for index in range(self._sizes.num_experts):
            up_bias, down_bias = self._biases(index)
            up, back = self.gate_up[index].native(up_bias), self.down[index].native(down_bias)
            if up is None or back is None:
                return None
            gate_up.append(up)
            down.append(back)
        return NativeExperts.of(gate_up, down, first, top_k, clamp, weighs_inputs)

    def _biases(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        form = self.form
        biases = (None, None) if form is None else (form.gate_up_bias, form.down_bias)
        first, second = (None if bias is None else bias[expert] for bias in biases)
        return first, second

    def apply(self, x: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
        native = None if torch.compiler.is_compiling() else self.native(first, chosen.shape[1])
        if native is not None:
            return native.apply(x, chosen, weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        num_here = self._sizes.num_experts
        top_k = chosen.shape[1]
        local = chosen.reshape(-1).long() - first
        local = torch.where((local < 0) | (local >= num_here), num_here, local)
        order = local.argsort(stable=True)
        factors = weights.reshape(-1)[order].unsqueeze(1)
        tokens = order // top_k
        start = 0
        for expert, count in enumerate(torch.bincount(local, minlength=num_here).tolist()[:num_here]):
            if count:
                part = slice(start, start + count)
                result = self._expert(expert, x[tokens[part]]).float().mul_(factors[part])
                out.index_add_(0, tokens[part], result)
            start += count
        return out.to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        gate_up = self.gate_up[expert]
        down = self.down[expert]
        up_bias, down_bias = self._biases(expert)
        inner = gate_up.apply(x, up_bias)
        if self.form is not None and self.form.clamp is not None:
            return down.apply(self.form.gated(inner), down_bias)
        if inner.shape[1] == self._sizes.inner_size:
            return down.apply(inner, down_bias)
        return down.gated_apply(inner, self._gate, down_bias)


class StackedExperts(ExpertWeights):
    """All experts in two tensors of one type."""

    factors: tuple[Tensor, Tensor] | None = None
    """Of 8-bit floats, a factor per output: [N, 2 * I] and [N, E] float32."""
    invariant = False
    """Whether a token has the same bits whatever is computed beside it."""

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> None:
        shape = (sizes.num_experts, 2 * sizes.inner_size, sizes.size)
        self.gate_up = torch.empty(shape, dtype=dtype, device=device)
        self.down = torch.empty(sizes.num_experts, sizes.size, sizes.inner_size, dtype=dtype, device=device)
        self.form: moe.ExpertForm = moe.form_of(gate)

    def put_gate_up(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        self.gate_up[expert].copy_(floats(weight, self.gate_up.dtype))

    def put_down(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        self.down[expert].copy_(floats(weight, self.down.dtype))

    def apply(self, x: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
        return moe.experts(x, self.gate_up, self.down, chosen, weights, first, self.form, self.factors, self.invariant)
