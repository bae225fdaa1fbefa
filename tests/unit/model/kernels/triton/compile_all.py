"""Compiles the Triton kernels behind `ops` for compute capability 9.0, without a GPU; run by test_compiles.py, as
`python -m tests.unit.model.kernels.triton.compile_all PART...`.

Launches are caught and compiled instead: the interpreter, in which the other tests run, accepts more than the compiler.
"""

import dataclasses
import sys
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32",
    torch.int64: "i64", torch.float64: "fp64", torch.int16: "i16", torch.float16: "fp16",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg", "enable_fp_fusion")
compiled: list[str] = []


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, GluonDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
    return "fp32" if isinstance(value, float) else "i32"


def compile_instead(self, *args, grid, warmup=False, **words):
    options = {name: words.pop(name) for name in OPTIONS if name in words}
    given = dict(zip((parameter.name for parameter in self.params), args, strict=False)) | words
    given |= {"ASM": True} if "ASM" in given else {}  # as on a GPU
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(self.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        signature[parameter.name] = type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            hints[index,] = [["tt.divisibility", 16]]
    make_source = GluonASTSource if self.is_gluon() else ASTSource
    source = make_source(self, signature, constants, hints)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = kernel.asm["ptx"]
    if options.get("launch_pdl"):
        check_dependent(self, text)
    if ".local " in text:
        raise SystemExit(f"{self.__name__} keeps registers in memory")
    if any(isinstance(value, (TensorDescriptor, GluonDescriptor)) for value in given.values()):
        check_tma(kernel, text)
        if not self.is_gluon() and options.get("launch_pdl"):
            check_start(text, given.get("EARLY", False))
    compiled.append(self.__name__)


def check_dependent(kernel: JITFunction, text: str) -> None:
    """It lets the next one start, and waits for the one before, in Gluon every group of warps for itself."""
    waits = text.count("griddepcontrol.wait")
    if text.count("griddepcontrol.launch") != 1 or waits < 1 or (waits > 1 and not kernel.is_gluon()):
        raise SystemExit(f"{kernel.__name__} is launched before its input is there, and does not wait for it")


def check_tma(kernel, text: str) -> None:
    """Tiles come by the copy engine, the tensor cores multiply them, and they fit into shared memory."""
    if "cp.async.bulk.tensor" not in text or not ("wgmma.mma_async" in text or "mma.sync" in text):
        raise SystemExit("a tile is not fetched by TMA and multiplied by the tensor cores")
    if kernel.metadata.shared > 227 << 10:
        raise SystemExit(f"{kernel.metadata.shared} bytes of shared memory")


def check_start(text: str, early: bool) -> None:
    """The first tile is asked for before the kernel before has ended, where it may be, and nowhere else."""
    if early != (text.index("cp.async.bulk.tensor") < text.index("griddepcontrol.wait")):
        raise SystemExit(f"the first tile is asked for at the wrong time: early={early}")
    if 0 <= text.find("ld.global") < text.index("griddepcontrol.wait"):
        raise SystemExit("something is read before the kernel before has ended")


JITFunction.run = compile_instead

from pagemill.model.attention.backends import hopper_prompts, triton_invariant  # noqa: E402
from pagemill.model.attention.backends.triton_attn import TritonBackend  # noqa: E402
from pagemill.model.attention.backends.triton_invariant import InvariantTritonBackend  # noqa: E402
from pagemill.model.attention.capability import AttentionLayerSpec  # noqa: E402
from pagemill.model.kernels import packed  # noqa: E402
from pagemill.model.kernels.kv_target import KVTarget  # noqa: E402
from pagemill.model.kernels.moe import SILU, ExpertForm  # noqa: E402
from pagemill.model.kernels.packed_experts import PackedExperts  # noqa: E402
from pagemill.model.kernels.packed_layer import LayerWeights  # noqa: E402
from pagemill.model.kernels.routing import Routing  # noqa: E402
from pagemill.model.kernels.triton import (  # noqa: E402  # noqa: E402
    batching,
    choices,
    device,
    gated_prompts,
    invariant,
    launch,
    mla_prompts,
    mla_prompts_hopper,
    moe,
    moe_choices,
    moe_packed,
    packed_layer,
)
from pagemill.model.kernels.triton import packed as packed_kernels  # noqa: E402
from pagemill.model.kernels.triton.fp8_quantize import quantize  # noqa: E402
from pagemill.model.kernels.triton.gemv import gemv  # noqa: E402
from pagemill.model.kernels.triton.moe_grouped import combine  # noqa: E402
from pagemill.model.kernels.triton.moe_route import route  # noqa: E402
from pagemill.model.kernels.triton.moe_sort import sort_slots  # noqa: E402
from pagemill.model.kernels.triton.norm import rms_norm_floats, rms_norm_of_parts  # noqa: E402
from pagemill.model.kernels.triton.norm_before import NormBefore  # noqa: E402
from pagemill.model.kernels.triton.one_sum_choices import early_tiles  # noqa: E402
from pagemill.model.kernels.triton.one_sum_early import early_rows  # noqa: E402
from pagemill.model.kernels.triton.packed_choices import PackedChoice  # noqa: E402
from pagemill.model.kernels.triton.packed_gemv import packed_gemv  # noqa: E402
from pagemill.model.kernels.triton.skinny import skinny, skinny_add, skinny_parts  # noqa: E402
from tests.fakes.paged_attention import PagedCase  # noqa: E402


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def rows() -> None:
    device.rms_norm(half(1, 4096), half(4096), 1e-6, half(1, 4096))
    device.gated(half(1, 8192), False)
    device.argmax(torch.empty(2, 151936))
    device.argmax(half(256, 151936))
    device.rotate_(half(3, 32, 128), half(3, 128), half(3, 128))
    device.gather_pair(half(50, 128), half(50, 128), ints(4, dtype=torch.int64))


def eight_bits() -> None:
    for count in (40, 8192):
        rms_norm_floats(half(count, 4096), half(4096), 1e-6, half(count, 4096))
        rms_norm_floats(half(count, 576), torch.empty(576), 1e-6)
        quantize(half(count, 4096))
        quantize(half(count, 2 * 12288), "silu")
        quantize(half(count, 2 * 1024), "gelu_tanh")


def linears() -> None:
    x, weight = half(1, 4096), half(6144, 4096)
    for choice in (choices.GEMV_CANDIDATES[0], choices.GEMV_CANDIDATES[-1]):
        before = NormBefore(half(4096), 1e-6, half(1, 4096), half(1, 4096))
        gemv(x, weight, choice, gate="silu", norm=before)
        gemv(x, weight, choice, bias=half(6144), out_dtype=torch.float32)
    for rows in (8, 64):
        for choice in choices.skinny_candidates((12288, 4096, True), rows):
            skinny(half(rows, 4096), half(2 * 12288, 4096), choice, gate="silu")
        for choice in choices.skinny_candidates((6144, 4096, False), rows):
            skinny(half(rows, 4096), weight, choice, bias=half(6144), out_dtype=torch.float32)
    norm = (half(4096), 1e-6)
    for choice in choices.skinny_candidates((4096, 12288, False), 8):
        unscaled = skinny_add(half(8, 12288), half(4096, 12288), choice, half(8, 4096), norm)
        for after in choices.skinny_candidates((12288, 4096, True), 8):
            skinny(unscaled, half(2 * 12288, 4096), after, gate="silu")
    for choice in choices.skinny_candidates((4096, 12288, False), 64):
        parts = skinny_parts(half(64, 12288), half(4096, 12288), choice)
        rms_norm_of_parts(parts, *norm, torch.bfloat16, half(64, 4096))


def one_sum() -> None:
    invariant.linear(half(1, 4096), half(24576, 4096), gate="silu")
    invariant.linear(half(300, 4096), half(4096, 4096), half(4096))
    for rows, shape, gate in ((1, (24576, 4096), "silu"), (9, (6144, 4096), None), (3, (4096, 4096), None),
                              (2, (2048, 2048), None), (1, (1, 264), None), (8, (512, 264), "gelu_tanh")):  # fmt: skip
        bias = half(shape[0]) if rows > 2 else None
        outputs = shape[0] // (1 if gate is None else 2)
        tiles = early_tiles(rows, (outputs, shape[1], gate is not None), 132)
        early_rows(half(rows, shape[1]), half(*shape), tiles, bias, gate, torch.bfloat16, 132)


def integers() -> None:
    for bits in (4, 8):
        group = 128
        for outputs, inputs, gate in ((4096, 4096, None), (24576, 4096, "silu")):
            words = ints(outputs // 64, inputs * bits // 512, 64, 32, dtype=torch.int16)
            limits = torch.empty(inputs // group, outputs)
            weight = packed.Packed(words, limits, limits if bits == 8 else None, outputs, inputs, bits, group)
            for count in (1, 16, 64):
                packed_kernels.linear(half(count, inputs), weight, None, gate)
            packed_kernels.linear(half(256, inputs), weight)
            packed_kernels.linear(half(1, inputs).half(), weight, half(outputs).half(), gate)
            packed_gemv(half(1, inputs), weight, PackedChoice(1, 4, 4, 1, slices=16), gate=gate)
    packed_kernels.floats(weight, torch.bfloat16)
    halves = packed.Packed(ints(8, 4, 64, 32, dtype=torch.int16), torch.empty(16, 512), None, 512, 512, 4, 32, True)
    for x in (half(8, 512), half(8, 512).half()):
        packed_kernels.linear(x, halves)
        packed_gemv(x[:1], halves, PackedChoice(1, 4, 4, 1, slices=4))
    packed_kernels.floats(halves, torch.bfloat16)


def layers() -> None:
    for inner, rows in ((12288, 1), (14336, 8), (4096, 3)):
        weights = []
        for outputs, inputs in ((4096, 4096), (2 * inner, 4096), (4096, inner), (6144, 4096)):
            words = torch.empty(outputs // 64, inputs // 128, 64, 32, dtype=torch.int16, device="meta")
            limits = torch.empty(inputs // 128, outputs, device="meta")
            weights.append(packed.Packed(words, limits, None, outputs, inputs, 4, 128))
        made = LayerWeights(*weights, half(4096), half(4096), (1e-6, 1e-6))
        prepared = packed_layer.prepare(made)
        packed_layer.packed_layer(half(rows, 6144), half(rows, 4096), half(rows, 4096), prepared)


def attention_inputs() -> None:
    rope, norms = (half(3, 128), half(3, 128)), ((half(128), 1e-6), (half(128), 1e-6))
    slots, one = ints(300, dtype=torch.int64), torch.ones(1)
    for dtype, scale in ((torch.bfloat16, None), (torch.float8_e4m3fn, one)):
        cache = torch.empty(8, 2, 16, 8, 128, dtype=dtype)
        target = KVTarget(cache[:, 0], cache[:, 1], slots, scale, scale)
        device.attention_inputs(half(1, 6144), 32, 128, rope, norms, target)
        device.attention_inputs(half(300, 6144), 32, 128, rope, None, target)
    device.attention_inputs(half(3, 6144), 32, 128, rope)


def experts() -> None:
    for routing in (Routing(8, renormalize=True), Routing(4, True, True, 2.5, 4, 2, True)):
        chosen, weights = route(torch.empty(300, 128), routing, torch.empty(128))
        combine(half(chosen.numel(), 2048), chosen, weights, 0, 128)
    for count in (256, 8192):
        sort_slots(ints(count, 8), 0, 128, 32)
    biases = {"gate_up_bias": half(4, 1536), "down_bias": half(4, 2048)}
    for form in (SILU, ExpertForm(clamp=(1.702, 7.0), **biases)):
        for count in (1, 3):
            routed = ints(count, 8), torch.empty(count, 8), 0, form
            moe.few_one_sum(half(count, 2048), half(4, 1536, 2048), half(4, 2048, 768), *routed)


def packed_experts() -> None:
    clamped = ExpertForm(clamp=(1.702, 7.0), gate_up_bias=half(2, 1536), down_bias=half(2, 2048))
    for count in (8, 300):  # not packed, but as those are
        routed = ints(count, 4), torch.empty(count, 4)
        moe.experts(half(count, 2048), half(2, 1536, 2048), half(2, 2048, 768), *routed, 0, clamped)
        eight = half(2, 1536, 2048).to(torch.float8_e4m3fn), half(2, 2048, 768).to(torch.float8_e4m3fn)
        moe.experts(half(count, 2048), *eight, *routed, 0, SILU, (torch.empty(2, 16, 1536), torch.empty(2, 6, 2048)))
    for bits, group, halves, form in ((4, 128, False, SILU), (4, 32, True, clamped), (8, 64, False, SILU)):
        weights = []
        for outputs, inputs in ((1536, 2048), (2048, 768)):
            words = torch.empty(2, outputs // packed.TILE, inputs * bits // 512, 64, 32, dtype=torch.int16)
            limits = torch.empty(2, inputs // group, outputs)
            offsets = limits if bits == 8 else None
            like = packed.Packed(words[0], limits[0], offsets, outputs, inputs, bits, group, halves)
            weights.append(PackedExperts(words, limits, offsets, like))
        for _, choices_of_both in moe_choices.PACKED_EXPERTS:
            for order in (None, sort_slots(ints(40, 8), 0, 2, choices_of_both[0].block_m)):
                for choice, weight, gated in zip(choices_of_both, weights, (True, False), strict=True):
                    x = half(40, weight.like.num_inputs)
                    moe_packed.product(x, weight, ints(40, 8), order, 0, choice, form, gated=gated)


def sampling() -> None:
    device.mask_(torch.empty(4, 151936), ints(4, 4748))
    positions = ints(4, dtype=torch.int64)
    device.sample_rows(torch.empty(4, 151936), ints(4, 7), positions, ints(4))


def around_steps() -> None:
    for rows in (6, 192):
        last_tokens, turn = ints(33, dtype=torch.int64), ints(1, dtype=torch.int64)
        sampled = ints(rows, dtype=torch.int64)
        batching.end_verification(ints(6), ints(6), ints(rows), sampled, last_tokens, ints(4, 400), turn)
    for tokens_of in (None, ints(32000, dtype=torch.int64)):
        logits, last_tokens = torch.empty(6, 32000, dtype=torch.bfloat16), ints(33, dtype=torch.int64)
        batching.keep_guesses(logits, tokens_of, ints(6), last_tokens, ints(6, 5)[:, 1])


def attention() -> None:
    for heads, kv_heads, size, traits in (
        (32, 8, 128, {}),
        (6, 2, 96, {"window": 100, "has_sinks": True, "soft_cap": 30.0}),
        (4, 4, 64, {"chunk_size": 64, "alibi_slopes": (0.5, 0.25, 0.1, 0.1)}),
        (8, 1, 256, {}),
    ):
        spec = AttentionLayerSpec(heads, kv_heads, size, 0.1, **traits)
        PagedCase(spec, [(1, 5), (9, 9)], dtype=torch.bfloat16).run(TritonBackend)
    plain = AttentionLayerSpec(32, 8, 128, 0.1)
    PagedCase(plain, [(1, 270)] * 8, dtype=torch.bfloat16, prefix=256).run(TritonBackend)
    for size in (64, 128, 256):  # few parts of many requests, which are merged by the last of them
        spec = AttentionLayerSpec(32, 8, size, 0.1)
        PagedCase(spec, [(1, 5)] * 32, dtype=torch.bfloat16).run(TritonBackend)
    for heads, size in ((32, 128), (64, 128), (32, 64), (16, 256)):  # steps that verify drafts
        case = PagedCase(AttentionLayerSpec(heads, 8, size, 0.1), [(6, 9)], dtype=torch.bfloat16)
        case.padded(24, 4, max_query_len=6, decode_len=6).run(TritonBackend)
    case = PagedCase(plain, [(1, 5), (9, 9)], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    case.run(TritonBackend)


def invariant_attention() -> None:
    spec = AttentionLayerSpec(32, 8, 128, 0.1)
    case = PagedCase(spec, [(1, 5), (9, 9)], dtype=torch.bfloat16)
    case.run(InvariantTritonBackend)
    with mock.patch.object(triton_invariant, "is_hopper", return_value=True):
        case.run(InvariantTritonBackend)
        PagedCase(dataclasses.replace(spec, num_heads=6, num_kv_heads=2, head_size=80), [(1, 5)] * 20,
                  dtype=torch.float16).run(InvariantTritonBackend)  # fmt: skip


def prompts() -> None:
    for heads, kv_heads, size, traits in (
        (32, 8, 128, {}),
        (8, 8, 64, {"window": 100, "soft_cap": 30.0}),
        (8, 4, 256, {}),
        (16, 2, 128, {"chunk_size": 64, "has_sinks": True}),
    ):
        spec = AttentionLayerSpec(heads, kv_heads, size, 0.1, **traits)
        case = PagedCase(spec, [(5, 9), (100, 300)], dtype=torch.bfloat16)
        records, tiles = ints(17 * hopper_prompts.RECORD), ints(8)
        hopper_prompts.plan_ends(spec, case.common(), records, 1)
        plan = hopper_prompts.plan(spec, case.common(), records, tiles, tiles, 8)
        output, cache = half(105, heads, size), half(40, 2, 16, kv_heads, size)
        sinks = half(heads) if traits.get("has_sinks") else None
        hopper_prompts.attend(spec, sinks, output, output, cache, case.common(), plan)
    gated_prompts.gated_many(half(600, 512), half(512, 512), gelu=True)


def latent_prompts() -> None:
    rows, expanded = half(500, 576), half(500, 8, 256)
    tiles = mla_prompts.Tiles(ints(3, 8), ints(1))
    carried = mla_prompts.Carried(torch.empty(300, 8, 128), torch.empty(300, 8, 2), 0)
    mla_prompts.gather(rows, half(50, 16, 576), ints(3, 40), ints(9, 4))
    for either in (None, carried):
        for kernel in (mla_prompts, mla_prompts_hopper):
            kernel.attend(half(300, 16, 128), half(300, 16, 192), rows, expanded, tiles, 0.1, 0, either)


PARTS = {
    part.__name__: part
    for part in (
        rows,
        eight_bits,
        linears,
        one_sum,
        integers,
        layers,
        attention_inputs,
        experts,
        packed_experts,
        sampling,
        around_steps,
        attention,
        invariant_attention,
        prompts,
        latent_prompts,
    )
}
for dependent in (False, True):
    launch.set_dependent(dependent)
    for name in sys.argv[1:]:
        PARTS[name]()
print(" ".join(sorted(set(compiled))))
