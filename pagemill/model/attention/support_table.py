"""docs/reference/attention-backends.md, from what the backends say of themselves. Knows no backend by name."""

from collections.abc import Iterable, Iterator

from pagemill.catalog.attention import ATTENTION, cuda_order
from pagemill.model.attention.capability import ALL_TYPES, Capability, MultipleOf
from pagemill.model.attention.interface import AttentionBackend
from pagemill.model.attention.listed import ListedBackend

COLUMNS = (
    "backend", "runs here", "dtypes", "KV dtypes", "block sizes", "head sizes", "window", "chunks", "soft cap",
    "sinks", "ALiBi", "sparse", "MM prefix", "DCP", "attention", "compute capability",
)  # fmt: skip
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
INTRODUCTION = """
A backend is chosen per layer. With `--attention-backend NAME` (or `--attention-config.backend NAME`,
`-ac.backend NAME`, `-ac '{"backend": "NAME"}'`; not both) it is checked against the model and the machine, and start-up
fails with every reason why it does not fit. Otherwise the first that fits is taken, in the order of the platform; when
none does, the error lists all of them with their reasons.
"""
LEGEND = """
KV dtypes: `auto` is the model's type. Block sizes: `%N` means multiples of N. A backend that does not run here is
listed with what it can do elsewhere; choosing it fails, for pagemill has no implementation. FLASH_ATTN is version 3
where `flash_attn_interface` or a wheel with `vllm_flash_attn` is installed on compute capability 9, version 2
otherwise (`-ac.flash_attn_version` asks for one); that of torch (2.12 and later) and of the package flash-attn wants
blocks of multiples of 256 tokens.
"""


def page(note: str) -> str:
    """The whole page; `note` says that it is generated."""
    backends = {name: ATTENTION.resolve(name) for name in sorted(ATTENTION)}
    standard = [one for one in backends.values() if not one.capability.mla]
    latent = [one for one in backends.values() if one.capability.mla]
    return (
        f"# Attention backends\n\n{note}{INTRODUCTION.lstrip()}"
        f"\n## Order\n\n{_orders()}"
        f"\n## Attention with keys and values per head\n\n{_table(standard)}"
        f"\n## Multi-head latent attention\n\n{_table(latent)}{LEGEND}"
    )


def _orders() -> str:
    rows = []
    for title, compute in (("Blackwell (10.x)", (10, 0)), ("Ampere, Ada, Hopper (8.x, 9.x)", (9, 0))):
        for kind, mla in (("standard", False), ("MLA", True)):
            rows.append((title, kind, ", ".join(f"`{name}`" for name in cuda_order(compute, mla))))
    rows.append(("CPU", "standard", "`CPU_ATTN`, `TORCH_CPU`"))
    return _rows(("device", "attention", "tried in this order"), rows)


def _table(backends: Iterable[type[AttentionBackend]]) -> str:
    return _rows(COLUMNS, (tuple(_cells(backend)) for backend in backends))


def _cells(backend: type[AttentionBackend]) -> Iterator[str]:
    able = backend.capability
    yield f"`{backend.name}`"
    yield _mark(not issubclass(backend, ListedBackend))
    yield ", ".join(SHORT[name] for name in ("float16", "bfloat16", "float32") if name in able.dtypes)
    yield ", ".join(sorted(able.kv_dtypes - {"float16", "float32"}))
    yield _block_sizes(able)
    yield "any" if able.head_sizes is None else ", ".join(str(size) for size in able.head_sizes)
    for value in (able.sliding_window, able.chunked_local, able.soft_cap, able.sinks, able.alibi, able.sparse):
        yield _mark(value)
    yield _mark(able.mm_prefix)
    yield _mark(able.decode_context_parallel)
    yield "all" if able.attention_types == ALL_TYPES else ", ".join(sorted(able.attention_types))
    yield _compute(able)


def _block_sizes(able: Capability) -> str:
    if able.block_sizes is None:
        return "any"
    if isinstance(able.block_sizes, MultipleOf):
        return f"%{able.block_sizes.number}"
    return ", ".join(str(size) for size in able.block_sizes)


def _compute(able: Capability) -> str:
    if "cuda" not in able.devices:
        return "n/a"
    if able.compute is None:
        return "any"
    (low, low_minor), (high, _) = able.compute
    if high >= 99:
        return f"{low}.{low_minor} and up"
    return f"{low}.x" if low == high else f"{low}.x to {high}.x"


def _mark(value: bool) -> str:
    return "yes" if value else "no"


def _rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
