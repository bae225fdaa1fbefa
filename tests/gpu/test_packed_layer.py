"""Everything between two attentions as one kernel: against float32, run to run, in graphs, and in an engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels import packed
from pagemill.model.kernels.packed_layer import HIDDEN, MAX_ROWS, LayerWeights, PackedLayer, between
from tests.fakes.compressed_checkpoint import Layout, compress
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.triton_interpreter import DEVICE
from tests.gpu.engines import Reference, greedy, make_llm, make_prompts, run

from pagemill.model.kernels.triton import launch  # isort: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.get_device_capability() < (9, 0), reason="no Hopper GPU"),
]
SIZES = [(12288, 4096, 6144), (14336, 4096, 6144), (4096, 8192, 2048), (2048, 4096, 8192)]
"""Inner size, inputs of o, outputs of qkv."""
EPS = 1e-5, 1e-6


@pytest.fixture(params=[False, True], ids=["plain", "dependent"])
def launches(request) -> Iterator[None]:
    launch.set_dependent(request.param)
    yield
    launch.set_dependent(False)


def random_weight(outputs: int, inputs: int) -> packed.Packed:
    words = torch.randint(-32768, 32768, (outputs // 64, inputs // 128, 64, 32), dtype=torch.int16, device="cuda")
    scales = (torch.rand(inputs // 128, outputs, device="cuda") + 0.5) / 4.6 / inputs**0.5
    return packed.Packed(words, scales, None, outputs, inputs, 4, 128)


def random_layer(inner: int, mixed: int, qkv: int) -> LayerWeights:
    norms = ((torch.rand(HIDDEN, device="cuda") + 0.5).bfloat16() for _ in range(2))
    return LayerWeights(
        random_weight(HIDDEN, mixed), random_weight(2 * inner, HIDDEN), random_weight(HIDDEN, inner),
        random_weight(qkv, HIDDEN), *norms, EPS,
    )  # fmt: skip


def inputs_of(rows: int, layer: LayerWeights) -> tuple[Tensor, Tensor]:
    attended = torch.randn(rows, layer.o.num_inputs, device="cuda").bfloat16()
    return attended, torch.randn(rows, HIDDEN, device="cuda").bfloat16()


def wanted(attended: Tensor, residual: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
    """qkv and residual, in float32."""

    def times(x: Tensor, weight: packed.Packed) -> Tensor:
        return functional.linear(x, packed.reference_floats(weight, torch.float32))

    def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()

    x = residual.float() + times(attended.float(), layer.o)
    gate, up = times(normed(x, layer.norm1, EPS[0]), layer.gate_up).chunk(2, -1)
    x = x + times(functional.silu(gate) * up, layer.down)
    return times(normed(x, layer.norm2, EPS[1]), layer.qkv), x


def kernel_of(layer: LayerWeights) -> PackedLayer:
    kernel = between(layer)
    assert kernel is not None
    return kernel


def close(result: Tensor, expected: Tensor) -> None:
    step = 1.5e-2 * float(expected.abs().max())
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=step)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("launches")
def test_every_number_of_rows(sizes: tuple[int, int, int]):
    layer = random_layer(*sizes)
    kernel = kernel_of(layer)
    for rows in range(1, MAX_ROWS + 1):
        attended, residual = inputs_of(rows, layer)
        results = [kernel.run(attended, residual.clone()) for _ in range(3)]
        for found, expected in zip(results[0], wanted(attended, residual, layer), strict=True):
            close(found, expected)
        for other in results[1:]:
            assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("launches")
def test_other_numbers_of_rows_from_launch_to_launch():
    """What a launch leaves to the next ones does not depend on its rows."""
    layer = random_layer(*SIZES[0])
    kernel = kernel_of(layer)
    cases = {rows: inputs_of(rows, layer) for rows in (1, 3, 8)}
    first = {rows: kernel.run(attended, residual.clone()) for rows, (attended, residual) in cases.items()}
    for rows in (8, 1, 8, 3, 3, 1, 1, 8):
        attended, residual = cases[rows]
        found = kernel.run(attended, residual.clone())
        assert all(torch.equal(one, two) for one, two in zip(first[rows], found, strict=True))


@pytest.mark.usefixtures("launches")
def test_rows_of_zeros_and_of_no_numbers():
    """A 0 is not taken for what was not written yet, nor does one row disturb others."""
    layer = random_layer(*SIZES[0])
    kernel = kernel_of(layer)
    attended, residual = inputs_of(4, layer)
    attended[1], residual[1], residual[2] = 0, 0, float("nan")
    qkv, total = kernel.run(attended, residual.clone())
    assert qkv[2].isnan().all() and total[2].isnan().all()
    kept = [0, 1, 3]
    for found, expected in zip((qkv, total), wanted(attended[kept], residual[kept], layer), strict=True):
        close(found[kept], expected)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.usefixtures("launches")
def test_layers_one_after_the_other_in_a_captured_graph(rows: int):
    layers = [random_layer(4096, 4096, 4096) for _ in range(4)]
    kernels = [kernel_of(layer) for layer in layers]
    first, start = inputs_of(rows, layers[0])

    def run_all() -> tuple[Tensor, Tensor]:
        x, residual = first, start.clone()
        for kernel in kernels:
            x, residual = kernel.run(x, residual)
        return x, residual

    x, residual = first.float(), start.float()
    for layer in layers:
        x, residual = wanted(x, residual, layer)
    found = [part.clone() for part in run_all()]
    close(found[1], residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_all()
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, two) for one, two in zip(found, results, strict=True))


def _calm(folder: Path) -> None:
    """Matrices as small as so many inputs need, rounded to bfloat16."""
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, tensor in weights.items():
            if tensor.dim() == 2 and "embed_tokens" not in name:
                tensor.mul_(0.1)
            weights[name] = tensor.bfloat16().float()
        save_file(weights, file, {"format": "pt"})


def test_an_engine_of_a_quantized_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Few requests run by the kernel, captured and not, and choose the tokens of the dequantized weights."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2048, "num_hidden_layers": 3, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    folder = make_checkpoint(tmp_path / "model", "Qwen3ForCausalLM", **sizes, **heads)
    _calm(folder)
    stored, plain = compress(folder, tmp_path, Layout(group_size=128))
    calls = []
    before = PackedLayer.run

    def counted(self: PackedLayer, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(attended))
        return before(self, attended, residual)

    monkeypatch.setattr(PackedLayer, "run", counted)
    reference = Reference(str(plain))
    for eager in (False, True):
        with make_llm(str(stored), enforce_eager=eager) as llm:
            for count in (1, 6):
                prompts = make_prompts(count)
                reference.check(prompts, run(llm, prompts, greedy(16)), "bfloat16")
    assert {1, 6} <= {*calls} and max(calls) <= MAX_ROWS
