"""Everything between two attentions of Qwen3-8B with weights of 4-bit integers, 1 to 8 rows: today's six kernels
beside one that stays (packed_layer.py), all 36 layers in a captured graph, so with cold weights.

    PYTHONPATH=. python benchmarks/gpu_packed_layer.py

Checks both against float32. Under 60 s on an H200, compiling included.
"""

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_kernels import time_us
from pagemill.model.kernels import fp8, ops, packed
from pagemill.model.kernels.packed_layer import LayerWeights
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.packed import by_choice
from pagemill.model.kernels.triton.packed_choices import PackedChoice, packed_choice
from pagemill.model.kernels.triton.packed_layer import packed_layer, prepare
from pagemill.model.kernels.triton.together import compile_together

HIDDEN, INNER, MIXED, QKV, GROUP, LAYERS = 4096, 12288, 4096, 6144, 128, 36
EPS = 1e-6
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"stages": 4},
    {"stages": 5},
    {"limit": 1},
    {"limit": 3},
    {"num_warps": 16},
)
PAUSE = 20_000
"""Clock ticks between layers, as attention would take them."""
POLLS = 1 << 17
"""Less patience than the engine has: some 0.1 s."""


def random_weight(outputs: int, inputs: int) -> packed.Packed:
    words = torch.randint(-32768, 32768, (outputs // 64, inputs // 128, 64, 32), dtype=torch.int16, device="cuda")
    scales = (torch.rand(inputs // GROUP, outputs, device="cuda") + 0.5) / 4.6 / inputs**0.5
    return packed.Packed(words, scales, None, outputs, inputs, 4, GROUP)


def random_norm() -> Tensor:
    return (torch.rand(HIDDEN, device="cuda") + 0.5).bfloat16()


def random_layer() -> LayerWeights:
    return LayerWeights(
        random_weight(HIDDEN, MIXED), random_weight(2 * INNER, HIDDEN), random_weight(HIDDEN, INNER),
        random_weight(QKV, HIDDEN), random_norm(), random_norm(), (EPS, EPS),
    )  # fmt: skip


def plain(attended: Tensor, residual: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
    """qkv and the residual, in float32 but for what is rounded for sure."""

    def times(x: Tensor, weight: packed.Packed) -> Tensor:
        return functional.linear(x.float(), packed.reference_floats(weight, torch.float32))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS) * weight.float()

    residual = (residual.float() + times(attended, layer.o).bfloat16().float()).bfloat16()
    gate, up = times(norm(residual, layer.norm1), layer.gate_up).chunk(2, -1)
    down = times(functional.silu(gate) * up, layer.down)
    residual = (residual.float() + down.bfloat16().float()).bfloat16()
    return times(norm(residual, layer.norm2), layer.qkv), residual


def today(attended: Tensor, residual: Tensor, layer: LayerWeights) -> Tensor:
    """qkv [1, QKV]; the residual in place."""
    mixed = packed.linear(attended, layer.o)
    normed = ops.rms_norm(mixed, layer.norm1, EPS, residual)
    inner = packed.linear(normed, layer.gate_up, None, "silu")
    normed = ops.rms_norm(packed.linear(inner, layer.down), layer.norm2, EPS, residual)
    return packed.linear(normed, layer.qkv)


def off(found: Tensor, wanted: Tensor) -> float:
    return (found.float().flatten() - wanted.float().flatten()).abs().max().item() / wanted.float().abs().max().item()


class Bench:
    """Weights; and for a number of rows inputs, and what is wanted."""

    def __init__(self) -> None:
        self.layers = [random_layer() for _ in range(LAYERS)]
        self.prepared = [prepare(layer) for layer in self.layers]
        self.set_rows(1)

    def set_rows(self, rows: int) -> None:
        self.rows = rows
        self.attended = torch.randn(rows, MIXED, device="cuda").bfloat16()
        self.residual = torch.randn(rows, HIDDEN, device="cuda").bfloat16()

    def layer(self, number: int, options: dict[str, Any] | None, attended: Tensor, residual: Tensor) -> Tensor:
        if options is None:
            return today(attended, residual, self.layers[number])
        qkv = torch.empty(self.rows, QKV, dtype=torch.bfloat16, device="cuda")
        packed_layer(qkv, attended, residual, self.prepared[number], polls=POLLS, **options)
        return qkv

    def chain(self, options: dict[str, Any] | None, pause: bool = False) -> tuple[Tensor, Tensor]:
        """All layers, with a part of qkv for what attention would give."""
        attended, residual = self.attended, self.residual.clone()
        for number in range(LAYERS):
            if pause:
                torch.cuda._sleep(PAUSE)
            qkv = self.layer(number, options, attended, residual)
            attended = qkv.view(-1)[: self.rows * MIXED].view(self.rows, MIXED)
        return qkv, residual

    def check(self, options: dict[str, Any] | None) -> tuple[float, float]:
        wanted = plain(self.attended, self.residual, self.layers[0])
        residual = self.residual.clone()
        qkv = self.layer(0, options, self.attended, residual)
        torch.cuda.synchronize()
        return off(qkv, wanted[0]), off(residual, wanted[1])

    def report(self, options: dict[str, Any] | None) -> None:
        name = (
            "today" if options is None else ", ".join(f"{key}={value}" for key, value in options.items()) or "as chosen"
        )
        name = f"{self.rows} rows, {name or 'as chosen'}"
        try:
            wrong = self.check(options)
            line = f"{name:<36} off by {wrong[0]:.4f} (qkv), {wrong[1]:.4f} (residual)"
            if not max(wrong) < 0.05:
                print(f"{line}: WRONG", flush=True)
                return
            chained, found, again = self.chain(None), self.chain(options), self.chain(options)
            same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
            far = ", ".join(f"{off(one, other):.4f}" for one, other in zip(found, chained, strict=True))
            us, slow = (time_us([partial(self.chain, options, pause)], replays=15) / LAYERS for pause in (False, True))
            print(
                f"{line} {us:>7.2f} us a layer, {slow:.2f} with pauses, all off from today's by {far}, repeats: {same}",
                flush=True,
            )
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def cases() -> Iterator[tuple[int, bool, dict[str, Any] | None]]:
    """Rows, whether launches are dependent, options."""
    yield from ((1, True, options) for options in (None, *CONFIGS))
    for rows in (2, 4, 8, 3, 5):
        yield from ((rows, True, options) for options in (None, {}))
    yield from ((1, False, options) for options in (None, {}))


def compile_all(bench: Bench) -> None:
    """At once, on threads."""

    def steps() -> Iterator[None]:
        for rows, dependent, options in cases():
            launch.set_dependent(dependent)
            bench.set_rows(rows)
            bench.layer(0, options, bench.attended, bench.residual)
        launch.set_dependent(True)
        yield

    started = time.perf_counter()
    with compile_together(steps(), whole=True):
        pass
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)


def tiles() -> None:
    """The four layers by themselves, as they are today."""
    for name, weight_shape in {"o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}.items():
        weights = [random_weight(*weight_shape) for _ in range(8)]
        x = torch.randn(1, weight_shape[1], device="cuda").bfloat16()
        gate = "silu" if name == "gate_up" else None
        us = time_us([partial(packed.linear, x, weight, None, gate) for weight in weights * 3])
        print(f"{name:<44} {us:>7.2f} us alone, today", flush=True)


def heads() -> None:
    """The output head in bfloat16, in 8-bit floats, and in integers of 8 and 4 bits."""
    x = torch.randn(1, HIDDEN, device="cuda").bfloat16()
    weight = torch.randn(151936, HIDDEN, dtype=torch.bfloat16, device="cuda") / HIDDEN**0.5
    eight = fp8.quantize(weight)
    calls = {
        "bfloat16": partial(ops.linear, x, weight, out_dtype=torch.float32),
        "8-bit floats": partial(fp8.linear, x, *eight),
        "4-bit integers": partial(packed.linear, x, random_weight(152064, HIDDEN)),
    }
    words = torch.randint(-32768, 32768, (152064 // 64, HIDDEN // 64, 64, 32), dtype=torch.int16, device="cuda")
    scales = torch.rand(HIDDEN // GROUP, 152064, device="cuda") / HIDDEN**0.5 / 127
    bytes_ = packed.Packed(words, scales, None, 151936, HIDDEN, 8, GROUP)
    for outputs, warps, slices in ((0, 4, 0), (4, 4, 32), (8, 4, 32), (16, 4, 32), (8, 8, 64), (4, 8, 64), (8, 4, 16)):
        choice = PackedChoice(1, outputs, warps, 1, slices=slices)
        calls[f"8-bit integers, {choice if slices else 'by rule'}"[:70]] = partial(
            by_choice, x, bytes_, choice if slices else packed_choice(1, (151936, HIDDEN, False), 8)
        )
    for name, call in calls.items():
        try:
            print(f"{'head, ' + name:<76} {time_us([call] * 12):>7.2f} us", flush=True)
        except Exception as error:
            print(f"head, {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    launch.set_dependent(True)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    bench = Bench()
    compile_all(bench)
    for rows, dependent, options in cases():
        launch.set_dependent(dependent)
        if not dependent:
            print("without dependent launch:")
        bench.set_rows(rows)
        bench.report(options)
    launch.set_dependent(True)
    tiles()
    heads()
    print("bytes a layer:", sum(
        one.words.numel() * 2 + one.scales.numel() * 4
        for one in (getattr(bench.layers[0], field.name) for field in dataclasses.fields(LayerWeights)[:4])
    ))  # fmt: skip


if __name__ == "__main__":
    main()
