"""`KNOWN_ELSEWHERE`: attention backends that other engines have and pagemill does not, with what they can do.

Choosing one of them by name fails with the reasons why, and the tables in the documentation are complete. The facts are
from published tables.
"""

from pagemill.model.attention.capability import ALL_TYPES, DECODER, Capability, Compute, MultipleOf

HALVES = frozenset({"float16", "bfloat16"})
FLOATS = HALVES | {"float32"}
CUDA = frozenset({"cuda"})
ROCM = frozenset({"rocm"})
HOPPER: tuple[Compute, Compute] = ((9, 0), (9, 9))
BLACKWELL: tuple[Compute, Compute] = ((10, 0), (10, 9))
HOPPER_ON: tuple[Compute, Compute] = ((9, 0), (10, 9))
AUTO = frozenset({"auto"})
AUTO_BF16 = frozenset({"auto", "bfloat16"})
AUTO_FP8 = frozenset({"auto", "bfloat16", "fp8", "fp8_e4m3"})
MANY_SIZES = (32, 64, 96, 128, 160, 192, 224, 256)
NOT_IMPLEMENTED = "pagemill has no implementation of it"
"""The reason against a backend of the table that could run a layer."""


def _mla(**traits: object) -> Capability:
    return Capability(**{"devices": CUDA, "dtypes": HALVES, "kv_dtypes": AUTO_BF16, "mla": True, **traits})  # type: ignore[arg-type]


def _rocm(**traits: object) -> Capability:
    return Capability(**{"devices": ROCM, "dtypes": HALVES, "kv_dtypes": AUTO, **traits})  # type: ignore[arg-type]


KNOWN_ELSEWHERE: dict[str, Capability] = {
    "FLASH_ATTN_DIFFKV": Capability(
        CUDA, HALVES, kv_dtypes=AUTO, decode_context_parallel=True, attention_types=frozenset({DECODER})
    ),
    "TREE_ATTN": Capability(CUDA, HALVES, MANY_SIZES, kv_dtypes=AUTO, block_sizes=MultipleOf(16)),
    "ROCM_AITER_FA": _rocm(head_sizes=(64, 128, 256), block_sizes=(16, 32)),
    "ROCM_AITER_UNIFIED_ATTN": _rocm(attention_types=ALL_TYPES),
    "ROCM_ATTN": _rocm(dtypes=FLOATS, head_sizes=MANY_SIZES, block_sizes=(16, 32, 544), attention_types=ALL_TYPES),
    "CUTLASS_MLA": _mla(kv_dtypes=AUTO_FP8, block_sizes=(128,), decode_context_parallel=True, compute=BLACKWELL),
    "FLASHINFER_MLA": _mla(kv_dtypes=AUTO_FP8, block_sizes=(32, 64), compute=BLACKWELL),
    "FLASHINFER_MLA_SPARSE": _mla(block_sizes=(32, 64), head_sizes=(576,), sparse=True, compute=BLACKWELL),
    "FLASHMLA": _mla(kv_dtypes=AUTO_FP8, block_sizes=(64,), decode_context_parallel=True, compute=HOPPER_ON),
    "FLASHMLA_SPARSE": _mla(
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=AUTO_BF16 | {"fp8_ds_mla"},
        block_sizes=(64,),
        head_sizes=(576,),
        sparse=True,
        compute=HOPPER_ON,
    ),
    "FLASH_ATTN_MLA": _mla(block_sizes=MultipleOf(16), decode_context_parallel=True, compute=HOPPER),
    "ROCM_AITER_MLA": _rocm(mla=True, block_sizes=(1,)),
    "ROCM_AITER_MLA_SPARSE": _rocm(mla=True, head_sizes=(576,), sparse=True),
    "ROCM_AITER_TRITON_MLA": _rocm(mla=True),
}
