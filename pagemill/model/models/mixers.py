"""Mixers with a state in the place of attention: Mamba, Mamba-2 and the gated delta rule. Each tensor-parallel rank
computes some channels or heads, with their states, and its share of the projection back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.model.distributed.split import even_split
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import ColumnLinear, JoinedColumnLinear, PickedLinear, RowLinear
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
from pagemill.model.loading.part import Part
from pagemill.model.loading.stored import LayerTensor, StoredTensor
from pagemill.model.network.operations import Network, Value


def numbers(*parts: range) -> Tensor:
    """[n] int64: the parts' numbers, one part after the other."""
    return torch.cat([torch.arange(part.start, part.stop) for part in parts])


def scaled_up(part: range, size: int, first: int = 0) -> range:
    """The elements of some heads, groups or channels of so many elements each, which begin at `first`."""
    return range(first + part.start * size, first + part.stop * size)


class SlicedNorm(RMSNorm):
    """An RMSNorm whose weight is split over the ranks."""

    def __init__(self, size: int, held: range, eps: float, *, ctx: LayerContext) -> None:
        super().__init__(size, eps, ctx=ctx)
        self._held = held

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """This rank's part."""
        return (LayerTensor(StoredTensor("weight", (self.size,)), 0, Part(0, self._held.start, self._held.stop)),)


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
        inner = sizes.inner_size
        what = "channels of Mamba layers"
        tp = ctx.groups.tp
        mine = even_split(inner, tp.rank, tp.size, what)
        conv = Convolution(inner, sizes.conv_size, numbers(mine), bias=sizes.conv_bias, ctx=ctx.child("conv1d"))
        vectors = {"A_log": (inner, sizes.state_size), "D": (inner,)}
        super().__init__(conv, (len(mine), sizes.state_size), vectors=vectors, rows=mine, ctx=ctx)
        self.sizes = sizes
        self.inner_size = len(mine)
        joined = 2 * sizes.state_size + sizes.rank
        self.in_proj = JoinedColumnLinear(
            sizes.size, (inner, inner), bias=sizes.bias, ctx=ctx.child("in_proj"), what=what
        )
        self.x_proj = RowLinear(inner, joined, bias=False, ctx=ctx.child("x_proj"), what=what)
        self.dt_proj = ColumnLinear(sizes.rank, (inner,), bias=True, ctx=ctx.child("dt_proj"), what=what)
        self.out_proj = RowLinear(inner, sizes.size, bias=sizes.bias, ctx=ctx.child("out_proj"), what=what)
        self.A_log = self.D = torch.empty(0)
        self.dt_layernorm: RMSNorm | None = None
        if sizes.norm_eps is not None:
            eps = sizes.norm_eps
            self.dt_layernorm = RMSNorm(sizes.rank, eps, ctx=ctx.child("dt_layernorm"))
            self.b_layernorm = RMSNorm(sizes.state_size, eps, ctx=ctx.child("b_layernorm"))
            self.c_layernorm = RMSNorm(sizes.state_size, eps, ctx=ctx.child("c_layernorm"))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixed, gate = net.split(net.linear(x, self.in_proj), self.inner_size, self.inner_size)
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
            dt, b, c = (
                self.dt_layernorm(dt.contiguous()),
                self.b_layernorm(b.contiguous()),
                self.c_layernorm(c.contiguous()),
            )
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
    out_bias: bool | None = None
    """Whether the projection back has a bias; None: as the other one."""
    normed: bool = True
    """Whether there is a norm of what comes out."""
    gates_first: bool = True
    """Whether the gate comes before that norm, else after it."""
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Of gates, values, B, C and time steps."""

    @property
    def inner_size(self) -> int:
        """H * P."""
        return self.num_heads * self.head_size


class Mamba2(RecurrentLayer):
    """A selective state space with a state for each head (Dao and Gu, 2024), and a norm of what comes out, gated.

    A rank has some heads and the groups that they are in. Of a single group it has all, and the norm sums over ranks.
    """

    def __init__(self, sizes: Mamba2Sizes, *, ctx: LayerContext) -> None:
        """Raises ConfigError when heads or groups cannot be dealt out."""
        tp = ctx.groups.tp
        heads = sizes.num_heads
        mine = even_split(heads, tp.rank, tp.size, "heads of Mamba-2 layers")
        shares = sizes.num_groups == 1
        groups = range(1) if shares else even_split(sizes.num_groups, tp.rank, tp.size, "groups of Mamba-2 layers")
        inner = sizes.inner_size
        shared = sizes.num_groups * sizes.state_size
        held = scaled_up(mine, sizes.head_size)
        first = scaled_up(groups, sizes.state_size, inner)
        second = scaled_up(groups, sizes.state_size, inner + shared)
        channels = numbers(held, first, second)
        conv = Convolution(
            inner + 2 * shared,
            sizes.conv_size,
            channels,
            bias=sizes.conv_bias,
            ctx=ctx.child("conv1d"),
            factors=_factors_of(sizes, len(held), len(first)),
        )
        vectors = {"A_log": (heads,), "D": (heads,), "dt_bias": (heads,)}
        state = (len(mine), sizes.head_size, sizes.state_size)
        super().__init__(conv, state, vectors=vectors, rows=mine, ctx=ctx)
        self.sizes = sizes
        self.num_heads = len(mine)
        self.num_groups = len(groups)
        self.inner_size = len(held)
        steps = scaled_up(mine, 1, 2 * inner + 2 * shared)
        picked = torch.cat([numbers(held), channels + inner, numbers(steps)])
        self.in_proj = PickedLinear(
            sizes.size, 2 * inner + 2 * shared + heads, picked, bias=sizes.bias, ctx=ctx.child("in_proj")
        )
        out_bias = sizes.bias if sizes.out_bias is None else sizes.out_bias
        self.out_proj = RowLinear(inner, sizes.size, bias=out_bias, ctx=ctx.child("out_proj"), what="heads")
        self.gated_norm = SlicedNorm(inner, held, sizes.eps, ctx=ctx.child("gated_norm")) if sizes.normed else None
        self._norms_over = tp if shares and tp.size > 1 else None
        self.A_log = self.D = self.dt_bias = torch.empty(0)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        projected = net.linear(x, self.in_proj)
        gate, mixed, dt = net.split(projected, self.inner_size, self.conv1d.channels, self.num_heads)
        y = net.call(self.advance, mixed, dt)
        return net.linear(net.call(self._gated, y, gate, by_rows=True), self.out_proj)

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
        shared = self.num_groups * sizes.state_size
        values, b, c = torch.split(x.float(), [self.inner_size, shared, shared], dim=-1)
        steps = functional.softplus(dt.float() * sizes.factors[4] + self.dt_bias).clamp(*sizes.limits)
        b, c = (part.reshape(len(x), self.num_groups, sizes.state_size) for part in (b, c))
        return values.reshape(len(x), self.num_heads, sizes.head_size), steps, -self.A_log.exp(), (b, c)

    def _skipped(self, x: Tensor, values: Tensor, y: Tensor) -> Tensor:
        return (y + values * self.D.unsqueeze(1)).flatten(1).to(x.dtype)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """silu(gate) * y, normed before or after, or not at all."""
        factor = functional.silu(gate.float() * self.sizes.factors[0])
        if self.gated_norm is None:
            return (y.float() * factor).to(y.dtype)
        if self.sizes.gates_first:
            return self.gated_norm.weight * self._normed(y.float() * factor).to(y.dtype)
        return (self.gated_norm.weight * self._normed(y.float()) * factor).to(y.dtype)

    def _normed(self, y: Tensor) -> Tensor:
        """[T, n] float32, divided by the root mean square of each group."""
        parts = y.view(len(y), self.num_groups, -1)
        squares = parts.pow(2).mean(-1, keepdim=True)
        if self._norms_over is not None:
            squares = self._norms_over.all_reduce(squares) / self._norms_over.size
        return (parts * torch.rsqrt(squares + self.sizes.eps)).flatten(1)


def _factors_of(sizes: Mamba2Sizes, num_values: int, num_shared: int) -> Tensor | None:
    """Of the channels of a rank's convolution; None where they are all 1."""
    _, values, b, c, _ = sizes.factors
    if values == b == c == 1.0:
        return None
    return torch.cat([torch.full((n,), f) for n, f in ((num_values, values), (num_shared, b), (num_shared, c))])


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
        """Raises ConfigError when the key heads cannot be dealt out."""
        tp = ctx.groups.tp
        what = "linear_num_key_heads"
        key_heads = even_split(sizes.num_key_heads, tp.rank, tp.size, what)
        heads = scaled_up(key_heads, sizes.num_heads // sizes.num_key_heads)
        keys = sizes.num_key_heads * sizes.key_size
        values = sizes.num_heads * sizes.value_size
        parts = (
            scaled_up(key_heads, sizes.key_size),
            scaled_up(key_heads, sizes.key_size, keys),
            scaled_up(heads, sizes.value_size, 2 * keys),
        )
        held = numbers(*parts)
        conv = Convolution(2 * keys + values, sizes.conv_size, held, bias=False, ctx=ctx.child("conv1d"))
        vectors = {"A_log": (sizes.num_heads,), "dt_bias": (sizes.num_heads,)}
        state = (len(heads), sizes.key_size, sizes.value_size)
        super().__init__(conv, state, vectors=vectors, rows=heads, ctx=ctx)
        self.sizes = sizes
        self.num_key_heads = len(key_heads)
        self.num_heads = len(heads)
        self._parts = tuple(len(part) for part in parts)
        size = sizes.size
        both = (2 * keys + 2 * values,)
        gates = (2 * sizes.num_heads,)
        self.in_proj_qkvz = ColumnLinear(size, both, bias=False, ctx=ctx.child("in_proj_qkvz"), what=what)
        self.in_proj_ba = ColumnLinear(size, gates, bias=False, ctx=ctx.child("in_proj_ba"), what=what)
        self.gated_norm = RMSNorm(sizes.value_size, sizes.eps, ctx=ctx.child("gated_norm"))
        self.out_proj = RowLinear(values, size, bias=False, ctx=ctx.child("out_proj"), what=what)
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
        heads = mixed.view(len(mixed), self.num_key_heads, -1)
        return torch.split(heads, [sizes.key_size, sizes.key_size, values, values], dim=2)

    def _mix(self, mixed: Tensor, gates: Tensor) -> Tensor:
        query, key, value, _ = self._by_key_head(mixed)
        b, a = gates.view(len(gates), self.num_key_heads, 2, -1).unbind(2)
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
            _unit(part.view(len(x), self.num_key_heads, -1)).repeat_interleave(repeats, dim=1) for part in (query, key)
        )
        b, a = gates.float().chunk(2, dim=1)
        decay = -self.A_log.exp() * functional.softplus(a + self.dt_bias)
        return query * sizes.key_size**-0.5, key, value.view(len(x), self.num_heads, -1), (decay, b.sigmoid())

    def _norm(self, y: Tensor, mixed: Tensor) -> Tensor:
        """Each head normed, times silu(gate)."""
        gate = self._by_key_head(mixed)[3].reshape(len(y), self.num_heads, -1)
        heads: Tensor = self.gated_norm(y.view(len(y), self.num_heads, -1))
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
