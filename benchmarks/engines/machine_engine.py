"""What the machine allows, as one contestant: read bandwidth, and the throughput of the products of matrices alone.

Usage: python machine_engine.py FOLDER_OF_A_LLAMA_MODEL NUM_THREADS. Weights are random; times are medians.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Works, answer_jobs
from torch import Tensor
from workload import Sizes

from pagemill.model.kernels.linear import linear, pack_bf16, packs_natively

READ_BYTES = 512 << 20
BUDGET = 2048
"""Prompt tokens of one step."""
LAYERS_AT_BUDGET = 3
"""Enough layers where the arithmetic is what takes the time."""

Product = Callable[[Tensor], Tensor]


class Machine:
    """Measures; keeps a layer's weights in each form there is, for as many layers as the model has."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        size, inner = config["hidden_size"], config["intermediate_size"]
        head = config.get("head_dim") or size // config["num_attention_heads"]
        kv_size = config["num_key_value_heads"] * head
        self._num_layers = config["num_hidden_layers"]
        self._kv_bytes = 2 * 2 * kv_size * self._num_layers
        q_size = config["num_attention_heads"] * head
        shapes = [(q_size + 2 * kv_size, size), (size, q_size), (2 * inner, size), (size, inner)]
        self._layers = [[torch.randn(shape).bfloat16() for shape in shapes] for _ in range(self._num_layers)]
        self._head = torch.randn(config["vocab_size"], size).bfloat16()
        self._memory = torch.ones(READ_BYTES // 4)
        self._products: dict[tuple[int, int], list[Product]] = {}

    def read_gbps(self, repetition: int, sizes: Sizes) -> float:
        """GB/s at which memory is read by the threads together."""
        return READ_BYTES / _median_seconds(self._memory.sum, 7) / 1e9

    def ceiling(self, repetition: int, sizes: Sizes) -> float:
        """Output tokens per second of `throughput` if there was nothing but the linear layers, in the fastest form of
        each, and the keys and values that decoding reads."""
        rows, steps = sizes.requests, sizes.output - 1
        prompt_tokens = rows * sizes.prompt
        chunk = min(BUDGET, prompt_tokens)
        prefill_s = self._layers_s(chunk, LAYERS_AT_BUDGET) * prompt_tokens / chunk
        head_s = self._seconds(-1, rows, [self._head])
        decode_s = self._layers_s(rows, self._num_layers) + head_s
        read_bytes = rows * (sizes.prompt + sizes.output / 2) * self._kv_bytes
        kv_s = read_bytes / (self.read_gbps(repetition, sizes) * 1e9)
        return rows * sizes.output / (prefill_s + head_s + steps * (decode_s + kv_s))

    def _layers_s(self, num_rows: int, num_layers: int) -> float:
        """Seconds of the linear layers of all layers, timed on the first `num_layers`."""
        timed = [
            self._seconds(which, num_rows, [layer[which] for layer in self._layers[:num_layers]]) for which in range(4)
        ]
        return sum(timed) * self._num_layers / num_layers

    def _seconds(self, which: int, num_rows: int, weights: list[Tensor]) -> float:
        x = torch.randn(num_rows, weights[0].shape[1]).bfloat16()
        if (which, num_rows) not in self._products:
            forms = [[make(weight) for weight in weights] for make in _forms(num_rows)]
            self._products[which, num_rows] = min(forms, key=lambda form: _all_seconds(form, x))
        return _all_seconds(self._products[which, num_rows], x)


def _forms(num_rows: int) -> list[Callable[[Tensor], Product]]:
    """How a product can be made from its weight, for a given number of rows."""

    def plain(weight: Tensor) -> Product:
        return lambda x: torch.nn.functional.linear(x, weight)

    def onednn(weight: Tensor) -> Product:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    def ours(weight: Tensor) -> Product:
        packed = pack_bf16(weight)
        return lambda x: linear(x, packed)

    return [plain] + [onednn] * torch.backends.mkldnn.is_available() + [ours] * packs_natively()


def _all_seconds(products: list[Product], x: Tensor) -> float:
    return _median_seconds(lambda: [product(x) for product in products], 3)


def _median_seconds(run: Callable[[], object], count: int) -> float:
    run()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def works() -> Works:
    torch.set_num_threads(int(sys.argv[2]))
    machine = Machine(Path(sys.argv[1]))
    return {work.__name__: work for work in (machine.read_gbps, machine.ceiling)}


if __name__ == "__main__":
    with torch.inference_mode():
        answer_jobs(works)
