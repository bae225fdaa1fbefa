"""A model over a paged cache, in steps that are padded and run in a graph mode, as a device's runner does it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagemill.config.graph_mode import GraphMode
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, forward_context
from pagemill.model.kernels import native
from pagemill.worker.batch.input_batch import build_batch
from pagemill.worker.batch.request_states import RequestStates
from tests.fakes.paged import PagedModel

MAX_TOKENS = 64


class PaddedModel:
    """`wrap` makes the callable that runs the model. Inputs lie at fixed addresses."""

    def __init__(self, path: Path, wrap: Any) -> None:
        self.paged = PagedModel.load(path, backend="TORCH_CPU")
        self.model = self.paged.model
        self.run = wrap(self.model)
        self.inputs = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)

    @torch.inference_mode()
    def logits(self, token_ids: list[int], counts: list[int], mode: GraphMode, padded: int) -> torch.Tensor:
        """[T, V] logits after every token, in steps of so many tokens, each padded."""
        states, paged = RequestStates(1, paged_len := self.paged.max_len), self.paged
        assert len(token_ids) == sum(counts) <= paged_len
        states.add(
            NewRequest("r", 0, np.array(token_ids, np.int32), len(token_ids), 0, paged.block_ids, SamplingParams())
        )
        paged.tables.reset(0, paged.block_ids)
        rows = []
        for count in counts:
            batch = build_batch(SchedulerOutput(0, np.zeros(1, np.int32), np.full(1, count, np.int32)), states)
            self.inputs[:count] = torch.from_numpy(batch.token_ids)
            self.positions[:count] = torch.from_numpy(batch.positions)
            self.inputs[count:padded] = 0
            self.positions[count:padded] = 0
            planned = {name: _Unpadded(plan, count) for name, plan in paged.groups.plan(batch).items()}
            with forward_context(ForwardContext(planned, mode, BatchDescriptor(padded, None))):
                hidden = self.run(self.inputs[:padded], self.positions[:padded])
            rows.append(self.model.compute_logits(hidden[:count]))
            states.advance(np.zeros(1, np.int32), np.full(1, count, np.int32))
        return torch.cat(rows)


class _Unpadded:
    """Metadata of a batch that is padded for the network and not for attention."""

    def __init__(self, plan: Any, count: int) -> None:
        self.plan, self.count = plan, count


def ignore_padding(model: Any, monkeypatch: Any) -> None:
    """Let the CPU backend of the model's layers see the tokens of the batch only. Kernels are torch's, for fake graphs
    record no others."""
    monkeypatch.setattr(native, "library", lambda: None)
    for layer in model.cache_layers().values():
        whole = layer._impl.forward

        def forward(query: Any, key: Any, value: Any, cache: Any, metadata: Any, whole: Any = whole) -> torch.Tensor:
            count = metadata.count
            result = torch.full_like(query, float("nan"))
            result[:count] = whole(query[:count], key[:count], value[:count], cache, metadata.plan)
            return result

        monkeypatch.setattr(layer._impl, "forward", forward)
