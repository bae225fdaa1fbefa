"""The kernels as operations of torch: opcheck, the same as in plain torch, what they refuse, and compiled."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagemill.model.kernels import native, reference, torch_ops
from pagemill.model.kernels.linear import GELU_TANH, SILU, PackedLinear, pack_bf16, with_bias
from pagemill.model.kernels.linear_int import FORMATS, pack_blocks
from pagemill.model.kernels.op_reference import REFERENCES
from pagemill.model.kernels.pack_linear import NO_GATE
from pagemill.model.quantization.panels import PanelWeight
from tests.marks import slow

from .conftest import make_paged
from .cpu.test_sample import settings_of
from .test_linear_int import make_blocks

pytestmark = pytest.mark.cases(one_in=6)

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
DTYPES = [torch.float32, torch.bfloat16]


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(name: str, outputs: int, inputs: int, gate: int = NO_GATE) -> PackedLinear:
    if name == "BF16":
        return pack_bf16(noise(outputs, inputs), gate=gate)
    return pack_blocks(FORMATS[name], make_blocks(FORMATS[name], outputs, inputs).flatten(1), inputs, gate)


def norm_cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in DTYPES:
        yield "rms_norm", (noise(5, 64, dtype=dtype), noise(64, dtype=dtype), 1e-5)
        yield "rms_norm", (noise(5, 6 * 16, dtype=dtype)[:, 16:64].view(5, 3, 16), noise(16, dtype=torch.float32), 1e-6)
        yield "add_rms_norm", (noise(4, 48, dtype=dtype), noise(4, 48, dtype=dtype), noise(48, dtype=dtype), 1e-5)
        strided = noise(48, 4, dtype=dtype).T
        yield "add_rms_norm", (strided.clone(), strided, noise(48, dtype=dtype), 1e-5)
        table, narrow = (noise(7, half, dtype=dtype).repeat(1, 2) for half in (16, 8))
        yield "rotate_", (noise(7, 3, 32, dtype=dtype), table, table)
        yield "rotate_", (noise(7, 9, 32, dtype=dtype)[:, 2:5], narrow, narrow)
        yield "rotate_", (noise(7, 32, 3, dtype=dtype).mT, table, table)
        yield "gated_activation", (noise(6, 90, dtype=dtype), "silu")
        yield "gated_activation", (noise(6, 90, dtype=dtype), "gelu_tanh")
        yield "argmax", (noise(3, 1000, dtype=dtype),)
    yield "argmax", (noise(3, 1000, dtype=torch.float16)[:, ::2],)
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(9, generator=generator, dtype=torch.float64)
    yield "sample", (noise(9, 500, dtype=torch.float32) * 3, *settings_of(9, generator), uniforms)


def linear_cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name in ("BF16", *FORMATS):
        x = noise(5, 96)
        for gate in (NO_GATE, SILU, GELU_TANH):
            yield "linear", (x, *torch_ops.linear_arguments(packed(name, 72, 96, gate)))
        biased = with_bias(packed(name, 70, 96), noise(70))
        yield "linear", (x, *torch_ops.linear_arguments(biased), torch.float32)
        weight, _, *form, _ = torch_ops.linear_arguments(packed(name, 70, 96))
        yield "linear_rows", (torch.tensor([69, 0, 33]), weight, *form)


def attention_cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    cuts: list[dict[str, Any]] = [
        {},
        {"window": 20},
        {"chunk_size": 64},
        {"soft_cap": 20.0, "block_size": 8},
        {"kv_dtype": torch.int8},
    ]
    for dtype in DTYPES:
        for cut in cuts:
            case = make_paged([(1, 40), (9, 9), (6, 300)], dtype=dtype, **cut)
            step = [case.query_start, case.seq_lens, case.block_table, case.slot_mapping]
            # Unused places are NaN, which equals nothing, when the caches are compared.
            cache = torch.nan_to_num(case.kv_cache)
            if cache.dtype == torch.int8:
                rows = reference.unpacked_cache(cache)
                cache = reference.packed_cache(rows.masked_fill((rows == -1).all(-1, keepdim=True), 0))
            limits = case.window, case.chunk_size, case.soft_cap
            yield "paged_attention", (case.query, case.key, case.value, cache, step, case.scale, *limits)
            yield "paged_attention", (case.query, None, None, cache, step, case.scale, *limits)


@pytest.fixture(params=["kernels", "plain torch"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """With the kernels, and where there are none."""
    if request.param == "kernels" and native.library() is None:
        pytest.skip("no native kernels here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain torch":
            patch.setattr(native, "library", lambda: None)
        yield request.param


CASES = [
    pytest.param(name, args, id=f"{name}-{index}")
    for index, (name, args) in enumerate([*norm_cases(), *linear_cases(), *attention_cases()])
]

FIRST = {case.values[0]: case.id for case in reversed(CASES)}
OPCHECKED = [case if FIRST[case.values[0]] == case.id else slow(*case.values, id=case.id) for case in CASES]
"""`make check` checks the first of each operation."""


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """With tensors of the same values and strides, that may be changed."""
    return tuple(
        torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype).copy_(arg) if isinstance(arg, Tensor) else arg
        for arg in args
    )


@pytest.mark.parametrize(("name", "args"), OPCHECKED)
def test_opcheck(library: native.Library, name: str, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(torch_ops.OPERATIONS[name], copies(args), test_utils=OPCHECKS)


@pytest.mark.parametrize(("name", "args"), CASES)
def test_it_is_what_plain_torch_says(way: str, name: str, args: tuple[Any, ...]) -> None:
    """Mutated arguments included; the kernels are held to closer bounds in their own tests."""
    ours, theirs = copies(args), copies(args)
    found = torch_ops.OPERATIONS[name](*ours)
    wanted = REFERENCES[name](*theirs)
    pairs = [(found, wanted), *zip(ours, theirs, strict=True)]
    for got, expected in pairs:
        if isinstance(got, Tensor):
            exact = not got.is_floating_point()
            limit = 0.0 if exact else 2e-5 if got.dtype == torch.float32 and name != "linear" else 2e-2
            largest = 1.0 if got.numel() == 0 or exact else max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(got, expected, rtol=limit, atol=limit * min(largest, 64.0))


def test_all_have_a_reference() -> None:
    registered = {name for name in dir(torch.ops.pagemill) if name in torch_ops.OPERATIONS}
    assert set(torch_ops.OPERATIONS) == set(REFERENCES) == registered == {case.values[0] for case in CASES}


BAD: list[tuple[str, Callable[[list[Any]], None], str]] = [
    ("rms_norm", lambda a: a.__setitem__(1, a[1][:-1]), r"weight is float32 \[63\], expected \[64\]"),
    ("add_rms_norm", lambda a: a.__setitem__(1, a[1][:-1]), r"residual is"),
    ("rotate_", lambda a: a.__setitem__(1, a[1][:-1]), r"cos is .* expected \[7, an even number up to 32\]"),
    ("gated_activation", lambda a: a.__setitem__(1, "relu"), r"activation is 'relu', expected silu or gelu_tanh"),
    ("argmax", lambda a: a.__setitem__(0, a[0][0]), r"logits are .* expected \[L, V\]"),
    ("sample", lambda a: a.__setitem__(3, a[3].long()), r"top_k is int64 \[9\], expected int32 \[9\]"),
    ("linear", lambda a: a.__setitem__(3, "Q2_K"), r"format is 'Q2_K', expected one of BF16, FLOAT8, NF4, Q4_0"),
    ("linear", lambda a: a.__setitem__(4, 200), r"expected contiguous panels of \d+ bytes: 200 x 96 in BF16"),
    ("linear", lambda a: a.__setitem__(0, a[0].float()), r"x is float32 \[5, 96\], expected bfloat16"),
    ("linear", lambda a: a.__setitem__(6, "relu"), r"gate is 'relu'"),
    ("linear_rows", lambda a: a.__setitem__(0, a[0].int()), r"indices are int32"),
    ("paged_attention", lambda a: a.__setitem__(3, a[3].mT), r"kv_cache"),
    ("paged_attention", lambda a: a[4].__setitem__(2, a[4][2] + 10_000), r"block_table: expected ids below"),
    ("paged_attention", lambda a: a[4].__setitem__(3, a[4][3] - 10_000), r"slot_mapping: expected slots in"),
    ("paged_attention", lambda a: a[4].__setitem__(1, a[4][1] + 10_000), r"seq_lens"),
    ("paged_attention", lambda a: a[4].__setitem__(0, a[4][0] + 1), r"query_start is .* expected to rise from 0"),
    ("paged_attention", lambda a: a.__setitem__(1, None), r"key and value: expected both or none"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), BAD)
def test_what_does_not_fit_is_named(name: str, spoil: Callable[[list[Any]], None], message: str) -> None:
    args = next(case.values[1] for case in CASES if case.values[0] == name)
    spoiled = [list(arg) if isinstance(arg, list) else arg for arg in copies(args)]
    spoil(spoiled)
    with pytest.raises(ValueError, match=message):
        torch_ops.OPERATIONS[name](*spoiled)


class Block(nn.Module):
    """Norm, gated linear layer, linear layer with a bias: on panels, as models use them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down = PanelWeight(packed(name, 2 * 64, 96, SILU)), PanelWeight(packed(name, 96, 64))
        self.bias, self.weight = noise(96), noise(96)
        self.head = PanelWeight(packed(name, 300, 96))

    def forward(self, ids: Tensor, residual: Tensor) -> Tensor:
        inner, residual = self.up.norm_apply(self.head.rows(ids) / 64, residual, (self.weight, 1e-5), None)
        hidden = self.down.apply(inner / 64, self.bias)
        return self.head.logits(hidden + residual)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [slow("eager"), "aot_eager"])
@pytest.mark.parametrize("name", [slow("BF16"), "Q4_1"])
def test_layers_are_compiled_whole(library: native.Library, backend: str, name: str) -> None:
    torch._dynamo.reset()
    block = Block(name)
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for count in (3, 5):
        ids, residual = torch.arange(count) * 7, noise(count, 96)
        with torch.inference_mode():
            wanted = block(ids, residual.clone())
            found = compiled(ids, residual.clone())
        # Norms are the compiler's: their rounding differs.
        assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.slow
def test_operations_of_a_compiled_function(library: native.Library) -> None:
    """Arguments that change inside compiled code, a view among them, change for the caller as well."""

    def step(qkv: Tensor, cos: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        torch.ops.pagemill.rotate_(qkv[:, 1:3], cos, cos)
        return torch.ops.pagemill.add_rms_norm(qkv.flatten(1), residual, weight, 1e-5)

    torch._dynamo.reset()
    args = noise(4, 4, 32), noise(4, 16).repeat(1, 2), noise(4, 128), noise(128)
    ours, theirs = copies(args), copies(args)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*ours)
    assert torch.equal(found, step(*theirs))
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.equal(got, expected)
    assert not torch.equal(ours[0], args[0])


@pytest.mark.slow
def test_start_up_registers_nothing() -> None:
    """Registering takes milliseconds: models that are not compiled do without."""
    code = "import sys, pagemill.model.factory, pagemill.model.models.llama, pagemill.worker.worker as w;"
    code += "sys.exit('pagemill.model.kernels.torch_ops' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
