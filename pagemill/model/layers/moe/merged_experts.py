"""`MergedExperts`: the experts of one layer whose weights a checkpoint has in one tensor for all, as [in, out].

On a GPU, and on a CPU in bfloat16 where there are kernels, they are held and computed as those of other models;
elsewhere one after the other, in plain torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pagemill.model.distributed.split import even_split, padded_split
from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.moe import ExpertForm
from pagemill.model.kernels.native_experts import NativeExperts
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.experts import Experts
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.part import Part
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats, with_rows
from pagemill.model.loading.stored import LayerTensor, StoredTensor
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights, Role
from pagemill.model.quantization.once import Once

WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class MergedForm:
    """What differs between families."""

    gate: ExpertForm
    """What is done with gate and up. Without biases: those come with the weights."""
    pairs: bool = False
    """Whether each gate is next to its up, in a checkpoint; else all gates come first."""
    biases: bool = False
    weighs_inputs: bool = False
    """Whether a token's weight multiplies what an expert gets, instead of what it gives."""


def _fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for all experts together."""
    return device.type != "cpu" or (dtype == torch.bfloat16 and packs_natively())


class MergedExperts(Experts):
    """Whole experts, dealt out over the expert-parallel ranks, or a slice of each over the tensor-parallel ranks."""

    def __init__(self, sizes: tuple[int, int, int], form: MergedForm, *, ctx: LayerContext) -> None:
        """`sizes`: of a token, of an expert's inside, and how many experts the model has. Raises ConfigError when
        they cannot be split."""
        nn.Module.__init__(self)
        self.name = ctx.name
        self.form = form
        self.exchange = ctx.exchange
        _, inner_size, num_experts = sizes
        self._whole = sizes
        self._dtype = ctx.dtype
        group = ctx.groups.ep if ctx.expert_parallel else ctx.groups.tp
        self.sums_over = group if group.size > 1 else None
        self._splits = not ctx.expert_parallel
        if ctx.expert_parallel:
            self.held = padded_split(num_experts, group.rank, group.size)
            self._inner = range(inner_size)
        else:
            self.held = range(num_experts)
            self._inner = even_split(inner_size, group.rank, group.size, "intermediate_size")
        self._method = ctx.method(0, Role.LINEAR)
        self._arrived: dict[str, dict[str, Tensor]] = {}
        """What has arrived of a weight that is stored in several tensors, by its name."""
        self._adds_bias = ctx.expert_parallel or group.rank == 0
        self.sizes = ExpertSizes(len(self.held), sizes[0], len(self._inner))
        self.weights: ExpertWeights | None = None
        """Where there are kernels, and `gate_up` and `down` are empty."""
        self.gate_up = self.down = torch.empty(0)
        """[X, E, 2 * I], gates first, and [X, I, E]."""
        self.gate_up_bias = self.down_bias = torch.empty(0)
        self._whole_form: ExpertForm | None = None
        """With the biases, when all have arrived."""
        self._note = Once("experts stored as %s are dequantized to %s")

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        size, inner, count = self._whole
        mine = Part(0, self.held.start, self.held.stop)
        pairs = self._splits and self.form.pairs
        first = self._inner.start
        last = self._inner.stop
        gate_up = Part(2, 2 * first, 2 * last) if pairs else mine
        down = Part(1, first, last) if self._splits else mine
        for name, part in (("gate_up_proj", gate_up), ("down_proj", down)):
            stored = self._stored(name)
            for one in stored:
                yield LayerTensor(one, 0, part if len(stored) == 1 else mine)
        if self.form.biases:
            bias = Part(1, 2 * first, 2 * last) if pairs else mine
            yield LayerTensor(StoredTensor("gate_up_proj_bias", (count, 2 * inner)), 0, bias)
            yield LayerTensor(StoredTensor("down_proj_bias", (count, size)), 0, mine)

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        name = next((name for name in WEIGHTS if any(one.kind == kind for one in self._stored(name))), None)
        if name is None:
            self._take_bias(kind, floats(tensor, self._dtype).to(self._dtype))
            return
        declared = self._stored(name)
        arrived = self._arrived.setdefault(name, {})
        arrived[kind] = floats(tensor, self._dtype)
        if len(arrived) < len(declared):
            return
        # Stored in several tensors, they are read whole: what is stored of a part may begin within a group.
        whole = len(declared) > 1
        arrange = self._gate_up_of if name == "gate_up_proj" else self._down_of
        weights = (
            arrange(one, whole) for one in self._method.decode_merged(name, self._arrived.pop(name), self._dtype)
        )
        if _fuses(tensor.device, self._dtype):
            self._hold(name, weights, tensor.device)
        else:
            setattr(self, name.removesuffix("_proj"), self._multiplied(name, weights, tensor.device))

    def _hold(self, name: str, weights: Iterator[Tensor | QuantizedTensor], device: torch.device) -> None:
        if self.weights is None:
            self.weights = self._method.experts(self.sizes, self._dtype, device, "silu")
            if device.type == "cpu":
                self.weights.form = self.form.gate
        put = self.weights.put_gate_up if name == "gate_up_proj" else self.weights.put_down
        for index, weight in enumerate(weights):
            put(index, weight)

    def _multiplied(self, name: str, weights: Iterator[Tensor | QuantizedTensor], device: torch.device) -> Tensor:
        """[X, in, out] of [out, in] each."""
        count, size, inner = self.sizes.num_experts, self.sizes.size, self.sizes.inner_size
        shape = (count, size, 2 * inner) if name == "gate_up_proj" else (count, inner, size)
        made = torch.empty(shape, dtype=self._dtype, device=device)
        for index, weight in enumerate(weights):
            if isinstance(weight, PackedWeight):
                self._note.warn(weight.description, str(self._dtype)[6:])
            made[index] = floats(weight, self._dtype).t()
        return made

    def _gate_up_of(self, weight: Tensor | QuantizedTensor, whole: bool) -> Tensor | QuantizedTensor:
        """[2 * I, E], gates first, of what is stored of one expert, or of all that was read of it."""
        return with_rows(weight, lambda rows: self._gates_first(rows, whole or not self.form.pairs))

    def _gates_first(self, rows: Tensor, all_read: bool) -> Tensor:
        """[.., ...] -> [2 * I, ...]. `all_read`: the outputs of other ranks are among them."""
        halves = [rows[0::2], rows[1::2]] if self.form.pairs else list(rows.chunk(2))
        if all_read and self._splits:
            halves = [half[self._inner.start : self._inner.stop] for half in halves]
        return torch.cat(halves)

    def _down_of(self, weight: Tensor | QuantizedTensor, whole: bool) -> Tensor | QuantizedTensor:
        """[E, I] of one expert."""
        if not (whole and self._splits):
            return weight
        first, last = self._inner.start, self._inner.stop
        if isinstance(weight, PackedWeight):
            return weight.with_columns(first, last)
        return floats(weight, self._dtype)[:, first:last]

    def _take_bias(self, kind: str, values: Tensor) -> None:
        """[X, 2 * I] or [X, E]."""
        if kind.startswith("gate_up"):
            self.gate_up_bias = self._gates_first(values.t(), not self.form.pairs).t().contiguous()
        else:
            self.down_bias = values.contiguous()

    def _stored(self, name: str) -> tuple[StoredTensor, ...]:
        size, inner, count = self._whole
        shape = (size, 2 * inner) if name == "gate_up_proj" else (inner, size)
        return self._method.merged_tensors(name, count, shape)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.weights is not None:
            return self._fused(self.weights, x, chosen, weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index, expert in enumerate(self.held):
            share = torch.where(chosen == expert, weights, 0).sum(1, keepdim=True)
            tokens = share.squeeze(1).nonzero().squeeze(1)
            if len(tokens):
                out.index_add_(0, tokens, self._weighted(index, x[tokens], share[tokens]))
        return out.to(x.dtype)

    def native(self, top_k: int) -> NativeExperts | None:
        if self.weights is None:
            return None
        self._complete_form(self.weights)
        return self.weights.native(self.held.start, top_k, self.form.weighs_inputs)

    def _complete_form(self, held: ExpertWeights) -> None:
        """Tell of the biases, which have all arrived."""
        if self._whole_form is None:
            down_bias = self.down_bias if self.form.biases and self._adds_bias else None
            gate_up_bias = self.gate_up_bias if self.form.biases else None
            held.form = self._whole_form = replace(self.form.gate, gate_up_bias=gate_up_bias, down_bias=down_bias)

    def _fused(self, held: ExpertWeights, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """All experts by the kernels for them."""
        self._complete_form(held)
        if not self.form.weighs_inputs:
            return held.apply(x, chosen, weights, self.held.start)
        num_tokens, top_k = chosen.shape
        native = None if torch.compiler.is_compiling() else self.native(top_k)
        if native is not None:
            return native.apply(x, chosen, weights)
        # Each slot is a token of its own, whose weight is in its inputs.
        inputs = (x[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)
        ones = torch.ones_like(weights).view(-1, 1)
        parts = held.apply(inputs, chosen.reshape(-1, 1), ones, self.held.start)
        return parts.view(num_tokens, top_k, -1).sum(1)

    def _weighted(self, index: int, x: Tensor, share: Tensor) -> Tensor:
        """What one expert adds for [T, E], by the weights [T, 1] -> [T, E] float32."""
        if self.form.weighs_inputs:
            return self._expert(index, (x * share).to(x.dtype)).float()
        return self._expert(index, x).float() * share

    def _expert(self, index: int, x: Tensor) -> Tensor:
        gate_up = x @ self.gate_up[index]
        if self.form.biases:
            gate_up = gate_up + self.gate_up_bias[index]
        result: Tensor = self.form.gate.gated(gate_up) @ self.down[index]
        return result + self.down_bias[index] if self.form.biases and self._adds_bias else result
