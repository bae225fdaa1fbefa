"""A model over a paged cache without engine or worker: for comparing logits, whole or in chunks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagemill.artifacts.describe import describe
from pagemill.engine.kv_cache.page_sizes import equal_pages
from pagemill.engine.kv_cache.planning import split_shared
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup, cache_dtype
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.model.distributed.parallel_groups import ParallelGroups
from pagemill.model.factory import load_model
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.models.causal_lm import CausalLM
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from pagemill.worker.batch.block_tables import BlockTable, BlockTables
from pagemill.worker.batch.input_batch import build_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.kv_tensors.allocate import bind_kv_cache
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from tests.fakes.configs import cache_config, model_config

BLOCK_SIZE = 16


class PagedModel:
    """One group per layer kind, blocks handed out in a shuffled order, unused blocks poisoned with NaN."""

    def __init__(self, model: CausalLM, kv_dtype: str, max_len: int = 2048) -> None:
        self.model, self.max_len = model, max_len
        layers = model.cache_layers()
        kept, shared = split_shared({name: layer.kv_spec(BLOCK_SIZE, kv_dtype) for name, layer in layers.items()})
        specs = equal_pages(kept)
        groups = tuple(
            KVCacheGroup(tuple(name for name in specs if specs[name] == spec), spec) for spec in set(specs.values())
        )
        blocks_each = max_len // BLOCK_SIZE
        plan = KVCacheConfig(1 + blocks_each * len(groups), groups, shared)
        for tensor in bind_kv_cache(plan, layers, "cpu"):
            tensor.fill_(0xFF)  # NaN, whatever the type of float
        self.tables = BlockTables(tuple(BlockTable(1, max_len, group.spec.block_size) for group in groups))
        self.groups = AttentionGroups(plan, layers, self.tables, "cpu")
        order = np.random.default_rng(0).permutation(np.arange(1, plan.num_blocks))
        self.block_ids = tuple(
            order[i * blocks_each :][: max_len // group.spec.block_size].tolist() for i, group in enumerate(groups)
        )

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: str = "float32",
        backend: str | None = None,
        kv_cache_dtype: str = "auto",
        model_impl: str = "auto",
        groups: ParallelGroups | None = None,
        **settings: Any,
    ) -> "PagedModel":
        facts = describe(str(path), path, model_impl=model_impl)
        config = model_config(str(path), dtype=dtype, attention_backend=backend, max_model_len=2048)
        cache = cache_config(kv_cache_dtype=kv_cache_dtype)
        model = load_model(facts, config, CpuPlatform(), PhaseTimer(), groups, cache)
        return cls(model, cache_dtype(kv_cache_dtype, dtype), **settings)

    @torch.inference_mode()
    def logits(
        self,
        token_ids: list[int],
        chunk: int | None = None,
        asked: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, V] logits after every token, computed `chunk` tokens at a time; of each chunk the rows `asked` for. On a
        later pipeline stage `hidden`, [T, E], are what the stage before has made of the tokens."""
        computed = self._chunks(token_ids, chunk or len(token_ids), asked, hidden)
        return torch.cat([self.model.compute_logits(rows) for rows in computed])

    @torch.inference_mode()
    def hidden(self, token_ids: list[int], chunk: int | None = None) -> torch.Tensor:
        """[T, E], what the model gives for every token: of an earlier pipeline stage, what the next one is given."""
        return torch.cat([rows.clone() for rows in self._chunks(token_ids, chunk or len(token_ids))])

    def _chunks(
        self,
        token_ids: list[int],
        size: int,
        asked: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> Iterator[torch.Tensor]:
        states = RequestStates(1, self.max_len)
        request = NewRequest("r", 0, np.array(token_ids, np.int32), len(token_ids), 0, self.block_ids, SamplingParams())
        states.add(request)
        self.tables.reset(0, self.block_ids)
        for start in range(0, len(token_ids), size):
            count = min(size, len(token_ids) - start)
            step = SchedulerOutput(0, np.zeros(1, np.int32), np.full(1, count, np.int32))
            batch = build_batch(step, states)
            inputs = torch.from_numpy(batch.token_ids) if hidden is None else hidden[start : start + count].clone()
            with forward_context(ForwardContext(self.groups.plan(batch))):
                yield self.model(inputs, torch.from_numpy(batch.positions), *(() if asked is None else (asked,)))
            states.advance(step.slots, step.num_tokens)
