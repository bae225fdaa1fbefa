"""A linear layer of a model of transformers, held and multiplied as those of models here: in any format of weights, and
split over tensor-parallel ranks where the model says how."""

from typing import Final

import torch
from torch import Tensor, nn

from pagemill.errors import ConfigError
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import ColumnLinear, HeadLinear, Linear, RowLinear

STYLES: Final = ("colwise", "rowwise")
WHOLE: Final = ("replicated", "replicated_with_grad_allreduce", "colwise_gather_output", "embedding_rowwise")
"""What every rank computes alike here: norms, embedding and output head."""


class HostedLinear(nn.Module):
    """[..., in] -> [..., out], in the place of an nn.Linear."""

    def __init__(self, linear: nn.Linear, style: str | None, *, ctx: LayerContext, head: bool = False) -> None:
        """`style`: how it is split, one of STYLES; None: not at all. `head`: whether it gives logits. Raises
        ConfigError where it cannot be split."""
        super().__init__()
        self._dtype = ctx.dtype
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        bias = linear.bias is not None
        what = f"the size of {ctx.name}"
        if style == "colwise":
            self.inner: Linear = ColumnLinear(linear.in_features, (linear.out_features,), bias=bias, ctx=ctx, what=what)
        elif style == "rowwise":
            self.inner = RowLinear(linear.in_features, linear.out_features, bias=bias, ctx=ctx, what=what)
        else:
            kind = HeadLinear if head else Linear
            self.inner = kind(linear.in_features, (linear.out_features,), bias=bias, ctx=ctx)

    @property
    def weight(self) -> Tensor:
        """[0], of the type that is computed in, for models that ask for it. Multiplying by it fails."""
        return torch.empty(0, dtype=self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], or this rank's part of them."""
        out: Tensor = self.inner(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """How a linear layer is split by a plan of transformers: patterns of names, in which * is a number, -> styles.
    Raises ConfigError for a style that is not known here."""
    parts = name.split(".")
    for pattern, style in plan.items():
        wanted = pattern.split(".")
        if len(wanted) == len(parts) and all(
            want == part or (want == "*" and part.isdecimal()) for want, part in zip(wanted, parts, strict=True)
        ):
            if style in STYLES:
                return style
            if style in WHOLE:
                return None
            raise ConfigError(
                f"tensor_parallel_size above 1: transformers splits {name} as {style!r}, which is not supported for "
                f"models that it computes (supported: {', '.join(STYLES)}); use --tensor-parallel-size 1"
            )
    return None
