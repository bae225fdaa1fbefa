"""`MergedExperts`: the experts of one layer whose weights a checkpoint has in one tensor for all, as [in, out].

They are computed one after the other, in plain torch; on a GPU each for all tokens, so that nothing waits for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagemill.model.distributed.split import even_split, padded_split
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.experts import Experts
from pagemill.model.loading.part import Part
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.loading.stored import LayerTensor, StoredTensor
from pagemill.model.quantization.interface import Role

WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class MergedForm:
    """What differs between families."""

    gated: Callable[[Tensor, Tensor], Tensor]
    """(gate, up) -> what goes to the linear layer back."""
    pairs: bool = False
    """Whether each gate is next to its up, in a checkpoint; else all gates come first."""
    biases: bool = False
    weighs_inputs: bool = False
    """Whether a token's weight multiplies what an expert gets, instead of what it gives."""


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
        self.gate_up = self.down = torch.empty(0)
        """[X, E, 2 * I] and [X, I, E]."""
        self.gate_up_bias = self.down_bias = torch.empty(0)

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
            self._take(kind, floats(tensor, self._dtype).to(self._dtype))
            return
        declared = self._stored(name)
        arrived = self._arrived.setdefault(name, {})
        arrived[kind] = floats(tensor, self._dtype)
        if len(arrived) < len(declared):
            return
        values = self._method.decode_merged(name, self._arrived.pop(name), self._dtype)
        if len(declared) > 1 and self._splits:  # read whole, for what is stored of a part may begin within a group
            first, last = self._inner.start, self._inner.stop
            if name == "down_proj":
                values = values[:, first:last]
            elif self.form.pairs:
                values = values[..., 2 * first : 2 * last]
        self._take(name, values)

    def _take(self, kind: str, values: Tensor) -> None:
        """Hold a weight, or the biases of one."""
        if kind.startswith("gate_up") and not self.form.pairs:
            halves = values.view(*values.shape[:-1], 2, -1)
            values = halves[..., self._inner.start : self._inner.stop].flatten(-2)
        setattr(self, kind.replace("_proj", ""), values.contiguous())

    def _stored(self, name: str) -> tuple[StoredTensor, ...]:
        size, inner, count = self._whole
        shape = (size, 2 * inner) if name == "gate_up_proj" else (inner, size)
        return self._method.merged_tensors(name, count, shape)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index, expert in enumerate(self.held):
            share = torch.where(chosen == expert, weights, 0).sum(1, keepdim=True)
            if x.is_cuda:
                out += torch.where(share != 0, self._weighted(index, x, share), 0)
                continue
            tokens = share.squeeze(1).nonzero().squeeze(1)
            if len(tokens):
                out.index_add_(0, tokens, self._weighted(index, x[tokens], share[tokens]))
        return out.to(x.dtype)

    def _weighted(self, index: int, x: Tensor, share: Tensor) -> Tensor:
        """What one expert adds for [T, E], by the weights [T, 1] -> [T, E] float32."""
        if self.form.weighs_inputs:
            return self._expert(index, (x * share).to(x.dtype)).float()
        return self._expert(index, x).float() * share

    def _expert(self, index: int, x: Tensor) -> Tensor:
        gate_up = x @ self.gate_up[index]
        if self.form.biases:
            gate_up = gate_up + self.gate_up_bias[index]
        pair = gate_up.view(len(x), -1, 2).unbind(-1) if self.form.pairs else gate_up.chunk(2, dim=-1)
        result: Tensor = self.form.gated(*pair) @ self.down[index]
        return result + self.down_bias[index] if self.form.biases and self._adds_bias else result
