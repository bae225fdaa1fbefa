"""Random weights of integers in groups, and what they stand for."""

import torch

from pagemill.model.kernels.packed import HALVES, pack
from pagemill.model.kernels.packed_experts import PackedExperts, padded_halves, room


def made(
    outputs: int, inputs: int, size: int, bits: int, with_zeros: bool, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """values [outputs, inputs], scales and zeros [outputs, groups]."""
    generator = torch.Generator().manual_seed(0)
    limit = 2 ** (bits - 1)
    values = torch.randint(-limit, limit, (outputs, inputs), dtype=torch.int8, generator=generator)
    shape = (outputs, -(-inputs // size))
    scales = (torch.rand(shape, generator=generator) + 0.5) / limit / inputs**0.5
    zeros = torch.randint(-limit, limit, shape, dtype=torch.int8, generator=generator) if with_zeros else None
    return values.to(device), scales.to(device), None if zeros is None else zeros.to(device)


def exact(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, size: int) -> torch.Tensor:
    """The weight in float32."""
    groups = torch.arange(values.shape[1], device=values.device) // size
    shifted = values.float() if zeros is None else values.float() - zeros.float()[:, groups]
    return shifted * scales.float()[:, groups]


def experts_of(
    outputs: int,
    inputs: int,
    group: int,
    kind: str,
    count: int,
    seed: int,
    device: str = "cpu",
    inner: int | None = None,
) -> PackedExperts:
    """`kind`: "4", "8", "4 zeros" or "halves". With `inner`, gates and ups are padded."""
    generator = torch.Generator().manual_seed(seed)
    bits = 8 if kind == "8" else 4
    made = None
    for index in range(count):
        if kind == "halves":
            values = HALVES[torch.randint(16, (outputs, inputs), generator=generator)]
        else:
            limit = 2 ** (bits - 1)
            values = torch.randint(-limit, limit, (outputs, inputs), dtype=torch.int8, generator=generator)
        groups = (outputs, -(-inputs // group))
        scales = (torch.rand(groups, generator=generator) + 0.5) / 2 ** (bits - 1) / inputs**0.5
        zeros = torch.randint(-8, 8, groups, dtype=torch.int8, generator=generator) if "zeros" in kind else None
        stored = values, scales, zeros
        if inner is not None:
            stored = tuple(part if part is None else padded_halves(part) for part in stored)
        parts = (part if part is None else part.to(device) for part in stored)
        weight = pack(*parts, group, bits, halves=kind == "halves")
        made = made or room(count, weight, inner)
        assert made.takes(weight)
        made.put(index, weight)
    assert made is not None
    return made
