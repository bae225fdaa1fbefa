"""`QuantMethod`: how the weight of a linear layer is stored and held, and `Quantization`: which method each layer of a
model has. Knows no model."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.kernels import ops
from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.moe import ExpertForm
from pagemill.model.kernels.native_experts import NativeExperts
from pagemill.model.kernels.packed import Packed
from pagemill.model.loading.quantized_tensor import QuantizedTensor, stacked
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart


class LinearWeight(ABC):
    """The weight of one linear layer, in whatever form its method computes fastest."""

    gate: str | None = None
    """The gated activation (silu, gelu_tanh) that `apply` may include: [T, in] -> [T, out / 2]. Where it is left out,
    [T, out], it is for `gated_apply` of the layer that follows."""
    plain: Tensor | None = None
    """[out, in], where kernels of the norm before or after may multiply with it."""
    packed: Packed | None = None
    """[out, in], where a kernel of several layers may multiply with it."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] -> [T, out]."""

    def gated_apply(self, x: Tensor, gate: str, bias: Tensor | None) -> Tensor:
        """`apply` of act(first half of x) * second half: [T, 2 * in] -> [T, out]."""
        return self.apply(ops.gated(x, gate), bias)

    def norm_apply(
        self, x: Tensor, residual: Tensor | None, norm: tuple[Tensor, float], bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(apply(norm(x + residual)), x + residual); `norm`: weight and eps. The sum may take the residual's place."""
        normed = ops.rms_norm(x, *norm, residual)
        return self.apply(normed, bias), x if residual is None else residual

    def logits(self, x: Tensor) -> Tensor:
        """`apply` for an output head: float32."""
        return self.apply(x, None).to(torch.float32)

    gives_rows: bool = False
    """Whether `rows` works, so that an embedding can share the weight."""

    def rows(self, indices: Tensor) -> Tensor:
        """[T] int64 -> [T, in]: rows of the weight. Raises TypeError where it has none to give."""
        raise TypeError(f"{type(self).__name__} gives no rows")

    def native(self, bias: Tensor | None) -> PackedLinear | None:
        """The form in which native code takes it; None when there is none."""
        return None


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of the experts of one layer that a rank holds."""

    num_experts: int
    size: int
    """E, of a token."""
    inner_size: int
    """I, between the two linear layers of an expert."""


class ExpertWeights(ABC):
    """The experts of one layer that a rank holds: each a gated linear layer and one back."""

    form: ExpertForm | None = None
    """What experts do between the two layers; None: `gate` was said, and nothing else can be."""

    @abstractmethod
    def put_gate_up(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        """[2 * I, E] of one expert, counted from 0 on this rank; the tensor may be freed afterwards."""

    @abstractmethod
    def put_down(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        """[E, I] of one expert."""

    @abstractmethod
    def apply(self, x: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
        """The weighted sum of each token's experts: [T, E] -> [T, E]. chosen [T, K] int32 are numbers of the model's
        experts, of which first .. first + num_experts are here; others add nothing. weights [T, K] float32."""

    def native(self, first: int, top_k: int, weighs_inputs: bool = False) -> NativeExperts | None:
        """The form in which native code takes them, `top_k` for a token; None when there is none. `weighs_inputs`: see
        `NativeExperts.of`."""
        return None


class ShapeError(ModelError):
    """A format cannot store a weight of this shape: whatever the configuration says, no checkpoint has it quantized."""


class QuantMethod(ABC):
    """How a checkpoint stores the weights of linear layers, and in which form they are computed here."""

    takes_blocks: bool = False
    """Whether `prepare` takes the blocks of integers of a quantized file (`BlockTensor`)."""
    takes_packed: bool = False
    """Whether `prepare` takes what readers of checkpoints make (`PackedWeight`); else it gets their floats."""
    holds_routers: bool = False
    """Whether routers are held by this method too, and not as plain floats."""

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """What a checkpoint holds of a weight [out, in]. Raises ShapeError."""
        return (StoredTensor("weight", shape, rows=Axis(0), columns=Axis(1)),)

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        """The weight, or a rank's part of it, of what was read of each of `tensors`, by kind: floats in `dtype`, a
        `PackedWeight`, or blocks where `prepare` takes them. Raises ModelError for values that cannot be."""
        weight = stored["weight"]
        return weight.to(dtype) if isinstance(weight, Tensor) else weight

    def merged_tensors(self, name: str, num_experts: int, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """What a checkpoint holds of the weights [in, out] of all experts of a layer, where it has them in one. Raises
        ShapeError."""
        return (StoredTensor(name, (num_experts, *shape)),)

    def decode_merged(
        self, name: str, stored: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Iterator[Tensor | QuantizedTensor]:
        """The weight [out, in] of each expert, floats in dtype, of what was read of each of `merged_tensors`, by kind:
        whole experts."""
        for weight in stored[name]:
            yield weight.t().to(dtype)

    @abstractmethod
    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        """[out, in], as any `decode` of the same model gives it -> the computing form. The given tensor may be freed
        afterwards.

        `gate` names the activation whose gate is the first half of the outputs, where there is one: silu or gelu_tanh.
        """

    def prepare_stacked(
        self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype, gate: str | None = None
    ) -> LinearWeight:
        """`prepare` of weights one under the other; floats are of the model's `dtype`."""
        return self.prepare(stacked(parts, dtype), gate)

    def prepare_qkv(self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype) -> LinearWeight:
        """`prepare_stacked` for the layer that makes queries, keys and values, whose errors matter the most."""
        return self.prepare_stacked(parts, dtype)

    @abstractmethod
    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        """Room for the experts of a layer, whose weights come as `prepare` takes them; `gate` as for `prepare`."""


class Role(Enum):
    """What a weight is for."""

    LINEAR = "linear layer"
    EMBEDDING = "embedding"
    HEAD = "output head"
    ROUTER = "router"
    STACKED = "experts in one tensor"
    """[X, out, in]: what quantizes the linear layers of a checkpoint leaves it as it is; methods for checkpoints of
    floats take each expert's part for the weight of a linear layer."""


class Quantization(ABC):
    """How the weights of one model are quantized: layer by layer."""

    @abstractmethod
    def method(self, module: str, role: Role) -> QuantMethod:
        """The method of a layer, by its name in the checkpoint, such as model.layers.0.self_attn.q_proj."""


class Uniform(Quantization):
    """One method for all linear layers, and one for embedding and output head."""

    def __init__(self, linear: QuantMethod, ends: QuantMethod | None = None) -> None:
        """`ends`: by default, the same."""
        self._linear = linear
        self._ends = ends or linear

    def method(self, module: str, role: Role) -> QuantMethod:
        return self._ends if role in (Role.EMBEDDING, Role.HEAD) else self._linear


@dataclass(frozen=True, slots=True)
class QuantRequest:
    """What a `Quantization` is made from."""

    dtype: torch.dtype
    """The model's."""
    device: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's quantization_config."""
    dequantize: bool = False
    """Whether quantized weights shall be computed as floats."""
    quantize_floats: bool = False
    """Whether what a quantized checkpoint stores as floats shall become integers of 8 bits."""
