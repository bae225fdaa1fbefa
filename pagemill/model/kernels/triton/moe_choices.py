"""Tiles of the kernels for experts: rules, by the slots (a token and one of its experts) that an expert has on average.

Data only. `benchmarks/gpu_moe.py --tune` measures the candidates.
"""

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class FewChoice:
    """Tiles of moe_few.py: outputs and inputs of a program's step."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class GroupedChoice:
    """Tiles of moe_grouped.py. `swap`: the weight is the left operand, so that its rows fill the wide side of the
    tensor cores' instruction when there are few tokens."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False

    def for_elements(self, num_bytes: int) -> "GroupedChoice":
        """For inputs of that size: what is under way at once must fit into shared memory."""
        return replace(self, block_k=self.block_k // 2) if num_bytes > 2 else self


MAX_FEW_SLOTS: Final = 64
"""Up to so many slots each is computed by itself: most are of different experts."""

FEW_GATE_UP: Final = FewChoice(4, 1024, 4)
FEW_DOWN: Final = FewChoice(4, 256, 4)
FEW_CANDIDATES: Final = tuple(
    FewChoice(*choice)
    for choice in (
        (1, 1024, 4), (2, 1024, 4), (4, 512, 4), (4, 1024, 4), (4, 2048, 8), (8, 256, 4), (8, 512, 4), (8, 1024, 8),
        (2, 256, 2), (4, 256, 4), (4, 256, 2), (16, 256, 8),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OneSumChoice:
    """Tiles of moe_one_sum.py: outputs (of the gate, and as many of up) and inputs of a step."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


ONE_SUM_GATE_UP: Final = OneSumChoice(16, 256, 1, 4)
ONE_SUM_DOWN_ONE: Final = OneSumChoice(16, 128, 2, 5)
ONE_SUM_DOWN: Final = OneSumChoice(32, 128, 2, 3)
"""Of one token, and of several."""
ONE_SUM_CANDIDATES: Final = (
    tuple(OneSumChoice(*choice) for choice in (
        (16, 256, 1, 4), (16, 256, 1, 3), (16, 512, 1, 3), (16, 128, 1, 6), (16, 128, 1, 8), (32, 128, 2, 5),
        (32, 256, 2, 3), (32, 256, 2, 4), (16, 256, 2, 4),
    )),
    tuple(OneSumChoice(*choice) for choice in (
        (16, 64, 2, 6), (16, 64, 2, 8), (16, 128, 1, 4), (16, 128, 2, 4), (16, 128, 2, 5), (16, 256, 1, 3),
        (32, 64, 2, 4), (32, 64, 2, 5), (32, 64, 4, 5), (32, 128, 2, 3),
    )),
)  # fmt: skip
"""Of the two layers."""

GATE_UP: Final = (
    (6, GroupedChoice(16, 64, 128, 4, 3, swap=True)),
    (24, GroupedChoice(32, 128, 128, 8, 3, swap=True)),
    (64, GroupedChoice(64, 128, 64, 4, 4)),
    (None, GroupedChoice(128, 128, 64, 8, 4, swap=True)),
)
"""Up to so many slots an expert on average -> tiles of the first layer; block_n of the gate and as many of up."""
DOWN: Final = (
    (6, GroupedChoice(16, 128, 64, 4, 4, swap=True)),
    (24, GroupedChoice(32, 128, 64, 4, 4, swap=True)),
    (64, GroupedChoice(64, 128, 64, 4, 4)),
    (None, GroupedChoice(128, 256, 64, 8, 3)),
)
"""The same for the second. Both have one block_m, for they share the sorted slots."""

GROUPED_CANDIDATES: Final = {
    16: ((64, 128, 4, 4), (64, 128, 4, 3), (32, 256, 4, 3), (128, 64, 4, 4), (64, 256, 4, 3), (128, 128, 8, 3)),
    32: ((64, 128, 4, 4), (64, 128, 4, 3), (32, 256, 4, 3), (128, 64, 4, 4), (64, 64, 4, 5), (128, 128, 8, 3)),
    64: ((64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4), (64, 128, 4, 3), (128, 128, 8, 3)),
    128: ((64, 64, 8, 4), (128, 64, 8, 4), (128, 64, 8, 3), (256, 64, 8, 3), (128, 64, 4, 4)),
}
"""block_m -> (block_n, block_k, num_warps, num_stages), each also with `swap`."""


@dataclass(frozen=True, slots=True)
class PackedExpertsChoice:
    """Tiles of moe_packed.py. `late`: scales are applied to the sums of a group; otherwise to the weights, rounded to
    the type of the rows."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    late: bool = True


PACKED_EXPERTS: Final = (
    (6, (PackedExpertsChoice(8, 64, 4, 3), PackedExpertsChoice(8, 128, 4, 4))),
    (12, (PackedExpertsChoice(16, 128, 4, 4), PackedExpertsChoice(16, 128, 4, 4))),
    (48, (PackedExpertsChoice(32, 64, 4, 3), PackedExpertsChoice(32, 128, 4, 3))),
    (192, (PackedExpertsChoice(64, 64, 4, 3, late=False), PackedExpertsChoice(64, 128, 4, 3, late=False))),
    (None, (PackedExpertsChoice(128, 64, 4, 3, late=False), PackedExpertsChoice(128, 64, 4, 3, late=False))),
)
"""Up to so many slots an expert on average -> tiles of both layers, of one block_m: they share the sorted slots.
block_n is of the gate and as many of up. On an H200."""
PACKED_EXPERTS_CANDIDATES: Final = {
    8: ((64, 4, 4), (64, 4, 3), (64, 4, 6), (128, 4, 4), (128, 8, 4), (64, 4, 4, False)),
    16: ((64, 4, 4), (64, 4, 3), (128, 4, 4), (128, 8, 4), (128, 4, 4, False), (64, 4, 4, False)),
    32: ((64, 4, 4), (64, 4, 3), (128, 4, 3), (128, 8, 4), (128, 4, 4, False), (64, 4, 4, False)),
    64: ((64, 4, 3), (128, 4, 3), (128, 8, 3), (64, 4, 3, False), (128, 4, 3, False), (128, 8, 4, False)),
    128: ((64, 4, 3, False), (64, 8, 3, False), (128, 8, 3, False), (128, 8, 4, False), (128, 8, 3)),
}
"""block_m -> (block_n, num_warps, num_stages, late)."""


def packed_experts_choices(num_slots: int, num_experts: int) -> tuple[PackedExpertsChoice, PackedExpertsChoice]:
    """Tiles of both layers for so many slots, of which few are a tile each."""
    average = 1 if num_slots <= MAX_FEW_SLOTS else num_slots / num_experts
    return next(choices for most, choices in PACKED_EXPERTS if most is None or average <= most)


def one_by_one(num_tokens: int, num_slots: int, num_experts: int) -> bool:
    """Whether slots are computed by themselves rather than grouped, where both are one sum: most are of different
    experts, those of one token all."""
    return num_slots <= MAX_FEW_SLOTS and (num_tokens == 1 or 2 * num_slots <= num_experts)


def one_sum_choices(num_tokens: int) -> tuple[OneSumChoice, OneSumChoice]:
    """Tiles of both layers."""
    return ONE_SUM_GATE_UP, ONE_SUM_DOWN_ONE if num_tokens == 1 else ONE_SUM_DOWN


def grouped_choices(num_slots: int, num_experts: int, num_bytes: int = 2) -> tuple[GroupedChoice, GroupedChoice]:
    """Tiles of both layers, for inputs of `num_bytes` an element."""
    average = num_slots / num_experts
    place = next(index for index, (most, _) in enumerate(GATE_UP) if most is None or average <= most)
    return GATE_UP[place][1].for_elements(num_bytes), DOWN[place][1].for_elements(num_bytes)
