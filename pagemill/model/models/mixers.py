"""Mixers with a state in the place of attention: Mamba, Mamba-2 and the gated delta rule. One rank computes each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.errors import ConfigError
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.recurrences import (
    delta_scan,
    delta_step,
    dual_scan,
    dual_step,
    selective_scan,
    selective_step,
)
from pagemill.model.layers.recurrent import Convolution, RecurrentLayer
from pagemill.model.network.operations import Network, Value


def refuse_split(ctx: LayerContext) -> None:
    """Raise ConfigError over several tensor-parallel ranks."""
    if ctx.groups.tp.size > 1:
        raise ConfigError(
            f"tensor_parallel_size={ctx.groups.tp.size}: layers with states, such as {ctx.name}, are not split; use "
            "--tensor-parallel-size 1, or --pipeline-parallel-size"
        )


@dataclass(frozen=True)
class MambaSizes:
    """Of a Mamba layer. Letters in shapes: T tokens, E hidden size, I channels, N elements of a channel's state."""

    size: int
    inner_size: int
    state_size: int
    rank: int
    """Of the projection to time steps."""
    conv_size: int
    bias: bool
    conv_bias: bool
    norm_eps: float | None = None
    """Of norms of time steps, B and C; None: there are none."""


class Mamba(RecurrentLayer):
    """A selective state space with a state for each channel (Gu and Dao, 2023)."""

    def __init__(self, sizes: MambaSizes, *, ctx: LayerContext) -> None:
        refuse_split(ctx)
        inner = sizes.inner_size
        convolution = Convolution(inner, sizes.conv_size, bias=sizes.conv_bias, ctx=ctx.child("conv1d"))
        vectors = {"A_log": (inner, sizes.state_size), "D": (inner,)}
        super().__init__(convolution, (inner, sizes.state_size), vectors=vectors, ctx=ctx)
        self.sizes = sizes
        self.in_proj = Linear(sizes.size, (2 * inner,), bias=sizes.bias, ctx=ctx.child("in_proj"))
        self.x_proj = Linear(inner, (sizes.rank + 2 * sizes.state_size,), bias=False, ctx=ctx.child("x_proj"))
        self.dt_proj = Linear(sizes.rank, (inner,), bias=True, ctx=ctx.child("dt_proj"))
        self.out_proj = Linear(inner, (sizes.size,), bias=sizes.bias, ctx=ctx.child("out_proj"))
        self.A_log = self.D = torch.empty(0)
        self.dt_layernorm: RMSNorm | None = None
        if sizes.norm_eps is not None:
            eps = sizes.norm_eps
            self.dt_layernorm = RMSNorm(sizes.rank, eps, ctx=ctx.child("dt_layernorm"))
            self.b_layernorm = RMSNorm(sizes.state_size, eps, ctx=ctx.child("b_layernorm"))
            self.c_layernorm = RMSNorm(sizes.state_size, eps, ctx=ctx.child("c_layernorm"))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        inner = self.sizes.inner_size
        mixed, gate = net.split(net.linear(x, self.in_proj), inner, inner)
        return net.linear(net.call(self.advance, mixed, gate), self.out_proj)

    def scan(self, x: Tensor, beside: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, I], the gate [T, I], state [I, N]."""
        y, state = selective_scan(*self._arguments(x), state)
        return self._gated(x, y, beside), state

    def step(self, x: Tensor, beside: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, I], the gate [R, I], state [R, I, N]."""
        y, state = selective_step(*self._arguments(x), state)
        return self._gated(x, y, beside), state

    def _arguments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        sizes = self.sizes
        dt, b, c = torch.split(self.x_proj(x), [sizes.rank, sizes.state_size, sizes.state_size], dim=-1)
        if self.dt_layernorm is not None:
            dt = self.dt_layernorm(dt.contiguous())
            b = self.b_layernorm(b.contiguous())
            c = self.c_layernorm(c.contiguous())
        steps = functional.softplus(self.dt_proj(dt.contiguous()).float())
        return x.float(), steps, -self.A_log.exp(), (b.float(), c.float())

    def _gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return ((y + x.float() * self.D) * functional.silu(gate.float())).to(x.dtype)


@dataclass(frozen=True)
class Mamba2Sizes:
    """Of a Mamba-2 layer. Letters in shapes: T tokens, E hidden size, H heads, P elements of a head, N elements of a
    state, G groups of heads with the same B and C."""

    size: int
    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    conv_size: int
    bias: bool
    conv_bias: bool
    eps: float
    limits: tuple[float, float] = (0.0, math.inf)
    """Between which time steps are."""

    @property
    def inner_size(self) -> int:
        """H * P."""
        return self.num_heads * self.head_size


class Mamba2(RecurrentLayer):
    """A selective state space with a state for each head (Dao and Gu, 2024), and a norm of what comes out, gated."""

    def __init__(self, sizes: Mamba2Sizes, *, ctx: LayerContext) -> None:
        refuse_split(ctx)
        inner = sizes.inner_size
        heads = sizes.num_heads
        channels = inner + 2 * sizes.num_groups * sizes.state_size
        convolution = Convolution(channels, sizes.conv_size, bias=sizes.conv_bias, ctx=ctx.child("conv1d"))
        vectors = {"A_log": (heads,), "D": (heads,), "dt_bias": (heads,)}
        super().__init__(convolution, (heads, sizes.head_size, sizes.state_size), vectors=vectors, ctx=ctx)
        self.sizes = sizes
        self.in_proj = Linear(sizes.size, (inner + channels + heads,), bias=sizes.bias, ctx=ctx.child("in_proj"))
        self.out_proj = Linear(inner, (sizes.size,), bias=sizes.bias, ctx=ctx.child("out_proj"))
        self.gated_norm = RMSNorm(inner, sizes.eps, ctx=ctx.child("gated_norm"))
        self.A_log = self.D = self.dt_bias = torch.empty(0)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        sizes = self.sizes
        channels = self.conv1d.channels
        gate, mixed, dt = net.split(net.linear(x, self.in_proj), sizes.inner_size, channels, sizes.num_heads)
        y = net.call(self.advance, mixed, dt)
        return net.linear(net.call(self._norm, y, gate, by_rows=True), self.out_proj)

    def scan(self, x: Tensor, beside: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H * P + 2 * G * N], time steps [T, H], state [H, P, N]."""
        values, dt, a, bc = self._arguments(x, beside)
        y, state = dual_scan(values, dt, a, bc, state)
        return self._skipped(x, values, y), state

    def step(self, x: Tensor, beside: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same of one token of each request, state [R, H, P, N]."""
        values, dt, a, bc = self._arguments(x, beside)
        y, state = dual_step(values, dt, a, bc, state)
        return self._skipped(x, values, y), state

    def _arguments(self, x: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        sizes = self.sizes
        shared = sizes.num_groups * sizes.state_size
        values, b, c = torch.split(x.float(), [sizes.inner_size, shared, shared], dim=-1)
        steps = functional.softplus(dt.float() + self.dt_bias).clamp(*sizes.limits)
        b, c = (part.reshape(len(x), sizes.num_groups, sizes.state_size) for part in (b, c))
        return values.reshape(len(x), sizes.num_heads, sizes.head_size), steps, -self.A_log.exp(), (b, c)

    def _skipped(self, x: Tensor, values: Tensor, y: Tensor) -> Tensor:
        return (y + values * self.D.unsqueeze(1)).flatten(1).to(x.dtype)

    def _norm(self, y: Tensor, gate: Tensor) -> Tensor:
        """silu(gate) * y, normed in groups."""
        gated = (y.float() * functional.silu(gate.float())).view(len(y), self.sizes.num_groups, -1)
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + self.sizes.eps)
        return self.gated_norm.weight * normed.flatten(1).to(y.dtype)


@dataclass(frozen=True)
class DeltaSizes:
    """Of a gated delta net. Letters in shapes: T tokens, Hk key heads of N elements, H value heads of P elements."""

    size: int
    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int
    conv_size: int
    eps: float


class DeltaNet(RecurrentLayer):
    """Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, 2024), and a norm of each head, gated.

    Query, key, value and gate of each key head lie next to each other in one weight, as in Qwen3-Next.
    """

    def __init__(self, sizes: DeltaSizes, *, ctx: LayerContext) -> None:
        refuse_split(ctx)
        keys = sizes.num_key_heads * sizes.key_size
        values = sizes.num_heads * sizes.value_size
        convolution = Convolution(2 * keys + values, sizes.conv_size, bias=False, ctx=ctx.child("conv1d"))
        vectors = {"A_log": (sizes.num_heads,), "dt_bias": (sizes.num_heads,)}
        state = (sizes.num_heads, sizes.key_size, sizes.value_size)
        super().__init__(convolution, state, vectors=vectors, ctx=ctx)
        self.sizes = sizes
        self._parts = (keys, keys, values)
        self.in_proj_qkvz = Linear(sizes.size, (2 * keys + 2 * values,), bias=False, ctx=ctx.child("in_proj_qkvz"))
        self.in_proj_ba = Linear(sizes.size, (2 * sizes.num_heads,), bias=False, ctx=ctx.child("in_proj_ba"))
        self.gated_norm = RMSNorm(sizes.value_size, sizes.eps, ctx=ctx.child("gated_norm"))
        self.out_proj = Linear(values, (sizes.size,), bias=False, ctx=ctx.child("out_proj"))
        self.A_log = self.dt_bias = torch.empty(0)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixed = net.linear(x, self.in_proj_qkvz)
        gates = net.linear(x, self.in_proj_ba)
        y = net.call(self._mix, mixed, gates)
        return net.linear(net.call(self._norm, y, mixed, by_rows=True), self.out_proj)

    def _by_key_head(self, mixed: Tensor) -> Sequence[Tensor]:
        """Query, key, value and gate of each key head, and its value heads."""
        sizes = self.sizes
        values = sizes.num_heads // sizes.num_key_heads * sizes.value_size
        heads = mixed.view(len(mixed), sizes.num_key_heads, -1)
        return torch.split(heads, [sizes.key_size, sizes.key_size, values, values], dim=2)

    def _mix(self, mixed: Tensor, gates: Tensor) -> Tensor:
        query, key, value, _ = self._by_key_head(mixed)
        b, a = gates.view(len(gates), self.sizes.num_key_heads, 2, -1).unbind(2)
        beside = torch.cat([b.flatten(1), a.flatten(1)], dim=1)
        return self.advance(torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1), beside)

    def scan(self, x: Tensor, beside: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, 2 * Hk * N + H * P], both gates [T, 2 * H], state [H, N, P]."""
        y, state = delta_scan(*self._arguments(x, beside), state)
        return y.flatten(1).to(x.dtype), state

    def step(self, x: Tensor, beside: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same of one token of each request, state [R, H, N, P]."""
        y, state = delta_step(*self._arguments(x, beside), state)
        return y.flatten(1).to(x.dtype), state

    def _arguments(self, x: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        sizes = self.sizes
        query, key, value = torch.split(x.float(), list(self._parts), dim=1)
        repeats = sizes.num_heads // sizes.num_key_heads
        query, key = (
            _unit(part.view(len(x), sizes.num_key_heads, -1)).repeat_interleave(repeats, dim=1) for part in (query, key)
        )
        b, a = gates.float().chunk(2, dim=1)
        decay = -self.A_log.exp() * functional.softplus(a + self.dt_bias)
        return query * sizes.key_size**-0.5, key, value.view(len(x), sizes.num_heads, -1), (decay, b.sigmoid())

    def _norm(self, y: Tensor, mixed: Tensor) -> Tensor:
        """Each head normed, times silu(gate)."""
        gate = self._by_key_head(mixed)[3].reshape(len(y), self.sizes.num_heads, -1)
        heads: Tensor = self.gated_norm(y.view(len(y), self.sizes.num_heads, -1))
        return (heads.float() * functional.silu(gate.float())).to(y.dtype).flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class MixerLayer(nn.Module):
    """A mixer behind a norm, and nothing else, as in Mamba's own models."""

    def __init__(self, mixer: Mamba | Mamba2, eps: float, *, ctx: LayerContext) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(mixer.sizes.size, eps, ctx=ctx.child("input_layernorm"))
        self.mixer = mixer

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        return x + self.mixer.operations(net, net.norm(x, self.input_layernorm))


def time_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """time_step_limit; what is written as no number (infinity) limits nothing."""
    given = config.get("time_step_limit") or (0.0, math.inf)
    low, high = (value if isinstance(value, (int, float)) else math.inf for value in given)
    return (low if low < math.inf else 0.0), high
