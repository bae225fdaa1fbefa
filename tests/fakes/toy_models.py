"""Dense models of the weights of a Llama, in other arrangements: as operations, and in plain modules of torch."""

from collections.abc import Callable
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from pagemill.model.attention.layer import Attention
from pagemill.model.kernels import ops
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.models.decoder import DecoderAttention, GatedMLP
from pagemill.model.models.llama import LlamaForCausalLM
from pagemill.model.network.operations import Network, Value

T = TypeVar("T", Tensor, Value)
STYLES = ("Usual", "Twice", "Parallel")
"""As ever; with the MLP, and the norm before it, two times; with attention and MLP of the same norm."""


class ToyLayer(nn.Module):
    """A decoder layer's parts, arranged in one of the styles."""

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    self_attn: DecoderAttention
    mlp: GatedMLP

    def __init__(self, layer: nn.Module, style: str) -> None:
        super().__init__()
        self.style = style
        for name, part in layer.named_children():
            self.add_module(name, part)

    def norm(self, name: str) -> RMSNorm:
        """One of the two norms."""
        norm: RMSNorm = getattr(self, name)
        return norm

    def arrange(self, x: T, norm: Callable[[T, str], T], attend: Callable[[T], T], mlp: Callable[[T], T]) -> T:
        """[T, E] -> [T, E]."""
        normed = norm(x, "input_layernorm")
        if self.style == "Parallel":
            return x + attend(normed) + mlp(normed)
        x = x + attend(normed)
        for _ in range(2 if self.style == "Twice" else 1):
            x = x + mlp(norm(x, "post_attention_layernorm"))
        return x


class OperationsLayer(ToyLayer):
    """As operations."""

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        return self.arrange(
            x,
            lambda x, name: net.norm(x, self.norm(name)),
            lambda x: self.self_attn.operations(net, x),
            lambda x: self.mlp.operations(net, x),
        )


class PlainLayer(ToyLayer):
    """In modules and functions of torch, one by one."""

    def __init__(self, layer: nn.Module, style: str, model: LlamaForCausalLM) -> None:
        super().__init__(layer, style)
        self._model = (model,)  # not as a module

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, E], [T] -> [T, E]."""
        rotary = self._model[0].rotaries["default"]
        return self.arrange(
            x, lambda x, name: self.norm(name)(x), lambda x: self._attend(x, *rotary.at(positions)), self._mlp
        )

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = self.self_attn
        query, key, value = part.qkv_proj(x).split(part.qkv_proj.sizes, dim=-1)
        size, attn = part.traits.head_size, part.attn
        assert isinstance(attn, Attention)
        query, key, value = (rows.reshape(len(x), -1, size) for rows in (query, key, value))
        ops.rotate_(query, cos, sin)
        ops.rotate_(key, cos, sin)
        result: Tensor = part.o_proj(attn(query, key, value).reshape(len(x), -1))
        return result

    def _mlp(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp.down_proj(ops.gated(self.mlp.gate_up_proj(x), self.mlp.activation))
        return result


class ToyForCausalLM(LlamaForCausalLM):
    """Subclasses say how the layers are arranged, and in what they are written."""

    style: ClassVar[str]
    plain: ClassVar[bool]

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        layer = super().make_layer(index, ctx)
        return PlainLayer(layer, self.style, self) if self.plain else OperationsLayer(layer, self.style)


for _style in STYLES:
    for _plain in (False, True):
        _name = f"{'Plain' if _plain else ''}{_style}ForCausalLM"
        globals()[_name] = type(_name, (ToyForCausalLM,), {"style": _style, "plain": _plain})
