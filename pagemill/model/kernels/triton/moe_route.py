"""Router logits to experts and weights, one program per token. Knows nothing about what experts compute."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.routing import Routing
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.argmax import ordered

_TAKEN = tl.constexpr(-0x80000000)


@triton.jit
def _best(keys, columns, LAST: tl.constexpr):
    """The column of the largest key, the first of equals. Integers, which a warp reduces in one instruction."""
    return tl.minimum(tl.min(tl.where(keys == tl.max(keys, 0), columns, LAST), 0), LAST)


@triton.jit
def _only_best_groups(choice, columns, GROUPS: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr,
                      BY_TWO: tl.constexpr, PLACES: tl.constexpr):  # fmt: skip
    """-inf in place of what is not in the best groups. PLACES: GROUPS, up to a power of two."""
    numbers = tl.arange(0, PLACES)
    group_of = columns // SIZE
    quality = tl.full([PLACES], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        members = tl.where(group_of == group, choice, float("-inf"))
        value = tl.max(members, 0)
        if BY_TWO:
            first = tl.argmax(members, 0)
            value += tl.max(tl.where(columns == first, float("-inf"), members), 0)
        quality = tl.where(numbers == group, value, quality)
    kept = columns < 0
    for _ in tl.static_range(TOP):
        best = tl.argmax(quality, 0)
        kept = kept | (group_of == best)
        quality = tl.where(numbers == best, float("-inf"), quality)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def _route(
    logits, bias, chosen, weights, stride, scale,
    X: tl.constexpr, BLOCK_X: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr,
    BY_TWO: tl.constexpr, GROUP_PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns, places = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    real = columns < X
    x = tl.load(logits + token * stride + columns, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + columns, mask=real, other=0.0)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        choice = _only_best_groups(choice, columns, GROUPS, TOP, X // GROUPS, BY_TWO, GROUP_PLACES)
    keys = tl.where(real, ordered(choice), _TAKEN)
    # Not negative, so their bits are ordered as they are.
    bits = scores.to(tl.int32, bitcast=True)
    experts = tl.zeros([BLOCK_K], tl.int32)
    values = tl.zeros([BLOCK_K], tl.int32)
    for place in tl.static_range(K):
        best = _best(keys, columns, X - 1)
        experts = tl.where(places == place, best, experts)
        values = tl.where(places == place, tl.max(tl.where(columns == best, bits, 0), 0), values)
        keys = tl.where(columns == best, _TAKEN, keys)
    values = values.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        values = values / (tl.sum(values, 0) + 1e-20)
    tl.store(chosen + token * K + places, experts, mask=places < K)
    tl.store(weights + token * K + places, values * scale, mask=places < K)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As kernels.moe.route: [T, X] -> experts [T, K] int32 and weights [T, K] float32."""
    num_tokens, num_experts = logits.shape
    top_k = routing.top_k
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        launch.on(_route, (num_tokens,))(
            logits, logits if bias is None else bias, chosen, weights, logits.stride(0), routing.scale,
            X=num_experts, BLOCK_X=triton.next_power_of_2(num_experts), K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k), SIGMOID=routing.sigmoid, RENORMALIZE=routing.renormalize,
            HAS_BIAS=bias is not None, GROUPS=routing.num_groups, TOP=routing.top_groups,
            BY_TWO=routing.group_by_two, GROUP_PLACES=triton.next_power_of_2(routing.num_groups),
            PDL=launch.dependent(), **launch.options(1),
        )  # fmt: skip
    return chosen, weights
