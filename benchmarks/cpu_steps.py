"""A decode step with the shapes of SmolLM2-135M and random weights, as one native call.

Knows the kernels; nothing about models, files or engines.
"""

import numpy as np
import numpy.typing as npt
import torch

from pagemill.model.kernels.layer_plan import LayerPlan, NativeNetwork, PlanBuilder
from pagemill.model.kernels.linear import SILU, PackedLinear, pack_bf16
from pagemill.model.kernels.linear_int import FORMATS as BLOCK_FORMATS
from pagemill.model.kernels.linear_int import pack_blocks
from pagemill.model.kernels.mirrors import Layer
from pagemill.model.kernels.pack_linear import NO_GATE
from pagemill.model.kernels.plan_parts import AttentionParts, NormWeight
from pagemill.worker.batch.block_tables import SlotTable
from pagemill.worker.batch.request_states import SlotArrays
from pagemill.worker.native.decode_step import Acceptance, DecodeStep

HIDDEN, INNER, VOCAB, NUM_LAYERS = 576, 1536, 49_152, 30
HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64
BLOCK_SIZE = 16
FORMATS = ("BF16", "Q8_0", "Q4_1")
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN, NO_GATE),
    "o": (HIDDEN, HEADS * HEAD_SIZE, NO_GATE),
    "gate_up + silu_mul": (2 * INNER, HIDDEN, SILU),
    "down": (HIDDEN, INNER, NO_GATE),
    "lm head": (VOCAB, HIDDEN, NO_GATE),
}
"""(outputs, inputs, gate)."""


def weight(format_name: str, layer: str) -> PackedLinear:
    """Any numbers: the kernels take the same time for all that are finite."""
    outputs, inputs, gate = LINEARS[layer]
    if format_name == "BF16":
        return pack_bf16(torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16(), gate=gate)
    kind = BLOCK_FORMATS[format_name]
    blocks = torch.randint(0, 256, (outputs, inputs // 32, kind.block_bytes), dtype=torch.uint8)
    limits = torch.randn(outputs, inputs // 32, kind.limit_bytes // 2) * 1e-3
    blocks[..., : kind.limit_bytes] = limits.half().view(torch.uint8)
    return pack_blocks(kind, blocks.flatten(1), gate=gate)


class Step:
    """One token of each of `num_requests` requests that have `length` tokens, greedy, and drafts behind it."""

    def __init__(self, format_name: str, num_requests: int, length: int, max_drafts: int = 0) -> None:
        known, length = length, length + max_drafts
        blocks = -(-length // BLOCK_SIZE)
        table = (torch.randperm(num_requests * blocks) + 1).int().view(num_requests, blocks).numpy()
        head = weight(format_name, "lm head")
        plan = self._layers(format_name, num_requests * blocks + 1, length, head)
        zeros, ones = np.zeros(num_requests, np.int32), np.ones(num_requests, np.float32)
        self._state = SlotArrays(
            token_ids=torch.randint(VOCAB, (num_requests, length + 1), dtype=torch.int32).numpy(),
            num_tokens=zeros + known,
            num_computed=zeros + known - 1,
            num_sampled=zeros.copy(),
            processed=np.zeros(num_requests, bool),
            greedy=np.ones(num_requests, bool),
            temperature=ones,
            min_p=zeros.astype(np.float32),
            top_k=zeros,
            top_p=ones,
            seed=zeros.astype(np.uint64),
        )
        tables = [SlotTable(table, BLOCK_SIZE, plan.groups)]
        self._step = DecodeStep(NativeNetwork(plan, head), self._state, tables)
        self._slots = np.arange(num_requests, dtype=np.int32)
        self._known = known

    def run(self, num_drafts: int = 0) -> npt.NDArray[np.int32]:
        """What was sampled, which is taken back."""
        if self._step.accepts(self._slots, np.full_like(self._slots, 1 + num_drafts)) is not Acceptance.ACCEPTED:
            raise RuntimeError("the step did not run as one native call")
        tokens = self._step.run().token_ids
        self._state.num_tokens[:] = self._known
        self._state.num_computed[:] = self._known - 1
        return tokens

    def _layers(self, format_name: str, num_blocks: int, length: int, head: PackedLinear) -> LayerPlan:
        table = torch.randn(length, HEAD_SIZE).clamp(-1, 1).bfloat16()
        norm = NormWeight(torch.ones(HIDDEN, dtype=torch.bfloat16), 1e-5)
        layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, 0, 0, HEAD_SIZE**-0.5, 0.0)
        builder = PlanBuilder()
        hidden = source = builder.buffer("embedded", HIDDEN)
        residual = None
        for index in range(NUM_LAYERS):
            cache = torch.randn(2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype=torch.bfloat16)
            parts = AttentionParts(f"layer {index}", layer, cache, (table, table))
            if residual is None:
                normed, residual = builder.norm(hidden, norm, "normed"), hidden
            else:
                normed, residual = builder.add_norm(hidden, residual, norm, "normed", "after MLP")
            qkv = builder.linear(normed, weight(format_name, "qkv"), "qkv")
            attended = builder.attention(qkv, parts, "attended")
            hidden = builder.linear(attended, weight(format_name, "o"), "hidden")
            normed, residual = builder.add_norm(hidden, residual, norm, "normed", "after attention")
            inner = builder.linear(normed, weight(format_name, "gate_up + silu_mul"), "inner")
            hidden = builder.linear(inner, weight(format_name, "down"), "hidden")
        result, _ = builder.add_norm(hidden, residual, norm, "result", "after MLP")
        return builder.finish(source, result, head)
