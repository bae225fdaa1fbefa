"""Products of up to some hundred rows of 8-bit floats by cuBLAS, in tiles of our choice: its own heuristic takes
tiles of 128 x 128 even where they are half as many as there are multiprocessors (benchmarks/gpu_cublas_rows.py).

Knows numbers of rows and shapes, not layers.
"""

import functools
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.log import get_logger
from pagemill.model.kernels.cublas_lt import Algo, CublasError, CublasLt, Kind, Product
from pagemill.model.kernels.gpu_facts import is_hopper, num_processors

logger = get_logger(__name__)

Tile = tuple[int, int]
"""Outputs and rows."""
Sizes = tuple[int, int, int]
"""M, N, K."""

MOST_ROWS = 512
"""Of more the library's own choice is as good."""
WORKSPACE_BYTES = 32 << 20
"""That a product may ask for; taken from torch's allocator while it runs."""
ALIGNMENT = 256
"""Of addresses, which the library's heuristic takes for granted."""
_TILES: dict[Kind, dict[Tile, tuple[int, int] | None]] = {
    Kind.FP8_ROWS: {
        (64, 32): (13, 1),
        (64, 64): (15, 0),
        (96, 64): (27, 0),
        (128, 32): (16, 1),
        (128, 64): (18, 0),
        (192, 64): (208, 0),
        (96, 128): (28, 0),
        (128, 128): (20, 0),
    },
    Kind.FP8_BLOCKS: {(128, 128): None},
}
"""Numbers of cublasLtMatmulTile_t, and which of the algorithm's variants has the tile (its CUSTOM_OPTION); None: what
the library chooses, which has tiles of that size. In blocks it accepts others that it never offers, and tiles of 128 x
64 give wrong results where there are more than multiprocessors."""
_EDGE_COST, _TILE_COST = 16, 4000
"""What a tile takes besides its products, in products: for each of its rows and outputs, and at all."""
_OVERLAP = 0.4
"""Of a turn of all multiprocessors, what the next one's first tiles may use if there is room."""
_NARROW = 64
"""Outputs of tiles of which four read their rows together, where these are the same for all tiles: otherwise all
multiprocessors ask for the same few lines at once."""
_ALONE, _FOUR = 2, 4
"""cublasLtClusterShape_t: a tile by itself, and four tiles along the outputs."""


def available(device: torch.device) -> bool:
    """Whether products there are computed in tiles of our choice. A compiler, which looks inside, is told no."""
    return not torch.compiler.is_compiling() and is_hopper(device) and _plans(device).has_library


def choose(kind: Kind, outputs: int, rows: int, processors: int) -> Tile:
    """The tile with which all multiprocessors are done first."""

    def cost(tile: Tile) -> float:
        tiles = -(-outputs // tile[0]) * -(-rows // tile[1])
        turns = (1 - _OVERLAP) * -(-tiles // processors) + _OVERLAP * tiles / processors
        return turns * (tile[0] * tile[1] + _EDGE_COST * sum(tile) + _TILE_COST)

    return min(_TILES[kind], key=cost)


def multiply(kind: Kind, rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor | None:
    """Numbers [M, K] with their factors times [N, K] with its own -> [M, N] bfloat16; None where torch is to do it.
    Factors: [M] and [N], or in blocks [K / 128, M] and [K / 128, N / 128], the latter with a block of outputs dense."""
    numbers, factors = rows
    values, scales = weight
    num_rows, size = numbers.shape
    if not 0 < num_rows <= MOST_ROWS or not available(numbers.device):
        return None
    out = torch.empty(num_rows, len(values), dtype=torch.bfloat16, device=numbers.device)
    addresses = values.data_ptr(), numbers.data_ptr(), out.data_ptr()
    dense = all(each.is_contiguous() for each in (numbers, values, factors, scales.t()))
    if not dense or any(address % ALIGNMENT for address in addresses):
        return None
    plans = _plans(numbers.device)
    sizes = num_rows, len(values), size
    plan = plans.plan(kind, sizes, (scales.data_ptr(), factors.data_ptr()))
    if plan is None:
        return None
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=numbers.device)
    stream = torch.cuda.current_stream(numbers.device).cuda_stream
    try:
        with plan.lock:
            plan.product.set_scales(scales.data_ptr(), factors.data_ptr())
            plan.product.run(plan.algo, addresses, (workspace.data_ptr(), plan.workspace_bytes), stream)
    except CublasError as error:
        plans.give_up(kind, sizes, error)
        return None
    return out


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product of these sizes is computed."""

    product: Product
    algo: Algo
    workspace_bytes: int
    lock: threading.Lock
    """While the product's factors are set and read."""


class Plans:
    """Those of one device, each made when it is first asked for."""

    def __init__(self, library: CublasLt | None, processors: int) -> None:
        self._library = library
        self._processors = processors
        self._known: dict[tuple[Kind, Sizes], Plan | None] = {}

    @property
    def has_library(self) -> bool:
        """Whether there can be plans."""
        return self._library is not None

    def plan(self, kind: Kind, sizes: Sizes, factors: tuple[int, int]) -> Plan | None:
        """`factors`: addresses of some, of weight and rows, without which the library has no opinion. None where there
        is no library, or it cannot do it."""
        if self._library is None:
            return None
        key = kind, sizes
        if key not in self._known:
            try:
                self._known[key] = self._made(self._library, kind, sizes, factors)
            except CublasError as error:
                self.give_up(kind, sizes, error)
        return self._known[key]

    def give_up(self, kind: Kind, sizes: Sizes, error: CublasError) -> None:
        """Leave products of these sizes to torch from now on."""
        logger.warning("products %s of M, N, K %s are left to torch: %s", kind.value, sizes, error)
        self._known[kind, sizes] = None

    def _made(self, library: CublasLt, kind: Kind, sizes: Sizes, factors: tuple[int, int]) -> Plan:
        product = Product(library, kind, sizes, WORKSPACE_BYTES)
        product.set_scales(*factors)
        algo = product.offered()[0]
        num_rows, outputs, _ = sizes
        settings = _settings(kind, choose(kind, outputs, num_rows, self._processors), num_rows)
        ours = None if settings is None else library.changed(algo, **settings)
        for each in (ours, algo):
            needed = None if each is None else product.workspace_of(each)
            if each is not None and needed is not None:
                return Plan(product, each, needed, threading.Lock())
        raise CublasError("what is offered cannot run")


def _settings(kind: Kind, tile: Tile, num_rows: int) -> dict[str, int] | None:
    """Of an algorithm with that tile; None for the library's own."""
    found = _TILES[kind][tile]
    if found is None:
        return None
    number, custom = found
    cluster = _FOUR if tile[0] == _NARROW and num_rows <= tile[1] else _ALONE
    return {"tile": number, "custom": custom, "cluster": cluster, "split": 1, "reduction": 0}


@functools.cache
def _plans(device: torch.device) -> Plans:
    with torch.cuda.device(device):
        return Plans(_library(), num_processors(device))


def _library() -> CublasLt | None:
    """None where it is missing, or older than CUDA 12.9, which first had factors of these kinds."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if version < (12, 9):
        return None
    try:
        return CublasLt()
    except (CublasError, OSError, AttributeError) as error:
        logger.info("products of 8-bit floats are left to torch: %s", error)
        return None
