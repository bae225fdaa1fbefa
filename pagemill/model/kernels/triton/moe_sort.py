"""Slots (a token and one of its experts) in the order of experts, and the tiles that cover them, without a look at the
host: every grid depends on shapes alone.

The order within an expert is arbitrary; nothing that is computed depends on it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch


@dataclass(frozen=True, slots=True)
class SortedSlots:
    """S slots, of which those of experts elsewhere are left out, and tiles of up to `tile_rows` slots of one expert."""

    slots: Tensor
    """[S] int32: the slots by expert; the end is not written when some are left out."""
    counts: Tensor
    """[N] int32: slots of each expert here."""
    tiles: Tensor
    """[3, max tiles] int32: expert, place in `slots`, and number of slots of each tile; 0 slots in those not needed."""
    tile_rows: int

    @property
    def max_tiles(self) -> int:
        """Tiles that there may be."""
        return self.tiles.shape[1]


@triton.jit
def _count(chosen, counts, ranks, num_slots, first, N: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots each expert has, and which of them each slot is."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen + slots, mask=slots < num_slots, other=-1) - first
    here = (slots < num_slots) & (expert >= 0) & (expert < N)
    rank = tl.atomic_add(counts + tl.where(here, expert, 0), 1, mask=here)
    tl.store(ranks + slots, rank, mask=here)


@triton.jit
def _place(
    chosen, counts, ranks, sorted_slots, tiles, num_slots, first, max_tiles,
    N: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Slots to their places, and what each tile covers; every program does some of both."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    experts = tl.arange(0, BLOCK_N)
    count = tl.load(counts + experts, mask=experts < N, other=0)
    begin = tl.cumsum(count, 0) - count
    num_tiles = (count + TILE - 1) // TILE
    tile_end = tl.cumsum(num_tiles, 0)
    tile_begin = tile_end - num_tiles
    numbers = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    expert = tl.load(chosen + numbers, mask=numbers < num_slots, other=-1) - first
    here = (numbers < num_slots) & (expert >= 0) & (expert < N)
    rank = tl.load(ranks + numbers, mask=here, other=0)
    is_mine = expert[:, None] == experts[None, :]
    place = tl.sum(tl.where(is_mine, begin[None, :], 0), 1) + rank
    tl.store(sorted_slots + place, numbers, mask=here)

    owner = tl.sum((tile_end[None, :] <= numbers[:, None]).to(tl.int32), 1)
    owns = owner[:, None] == experts[None, :]
    done = (numbers - tl.sum(tl.where(owns, tile_begin[None, :], 0), 1)) * TILE
    rows = tl.minimum(tl.sum(tl.where(owns, count[None, :], 0), 1) - done, TILE)
    used = (owner < N) & (numbers < max_tiles)
    start = tl.sum(tl.where(owns, begin[None, :], 0), 1) + done
    tl.store(tiles + numbers, tl.where(used, owner, 0), mask=numbers < max_tiles)
    tl.store(tiles + max_tiles + numbers, tl.where(used, start, 0), mask=numbers < max_tiles)
    tl.store(tiles + 2 * max_tiles + numbers, tl.where(used, rows, 0), mask=numbers < max_tiles)


def sort_slots(chosen: Tensor, first: int, num_experts: int, tile_rows: int) -> SortedSlots:
    """The slots of [T, K] chosen experts (int32, contiguous) by expert, for experts first .. first + num_experts."""
    num_slots, device = chosen.numel(), chosen.device
    max_tiles = num_slots // tile_rows + min(num_experts, num_slots)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    ranks = torch.empty(num_slots, dtype=torch.int32, device=device)
    slots = torch.empty(num_slots, dtype=torch.int32, device=device)
    tiles = torch.empty(3, max_tiles, dtype=torch.int32, device=device)
    _count[(triton.cdiv(num_slots, 256),)](chosen, counts, ranks, num_slots, first, N=num_experts, BLOCK=256)
    block = 64
    _place[(triton.cdiv(max(num_slots, max_tiles), block),)](
        chosen, counts, ranks, slots, tiles, num_slots, first, max_tiles,
        N=num_experts, BLOCK_N=triton.next_power_of_2(num_experts), TILE=tile_rows, BLOCK=block,
        PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip
    return SortedSlots(slots, counts, tiles, tile_rows)
