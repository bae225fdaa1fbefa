"""One planner per KV group and kind of layer: a step is planned once per group, not once per layer."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from pagemill.messages.kv_spec import KVCacheConfig
from pagemill.model.attention.interface import (
    CacheLayer,
    CascadePlanner,
    CommonAttentionMetadata,
    ReplayPlanner,
    StepOnHost,
    StepPlanner,
)
from pagemill.model.attention.state_layer import StatePlanner
from pagemill.worker.batch.block_tables import BlockTables, SlotTable
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.batch.input_batch import InputBatch


class AttentionGroups:
    """Plans a batch: layer name -> metadata, for the layers of this pipeline stage. A layer that reads another's cache
    is in that one's group."""

    def __init__(self, plan: KVCacheConfig, layers: Mapping[str, CacheLayer], tables: BlockTables, device: str) -> None:
        self._device = torch.device(device)
        groups = [
            _planners(
                [name for owner in group.layers if owner in layers for name in (owner, *plan.readers(owner))],
                layers,
                self._device,
            )
            for group in plan.groups
        ]
        self._tables = tables.groups
        self._groups = [(index, planners) for index, planners in enumerate(groups) if planners]
        self._on_host = [
            (index, planner)
            for index, planners in self._groups
            for planner, _ in planners
            if isinstance(planner, ReplayPlanner)
        ]

        self._keeps_states = any(isinstance(planner, StatePlanner) for planner in self.planners())

    @property
    def plans_on_host(self) -> bool:
        """Whether a planner has something to do on the host before a graph is replayed."""
        return bool(self._on_host)

    @property
    def indices(self) -> list[int]:
        """Of the groups that have layers here."""
        return [index for index, _ in self._groups]

    def slot_tables(self) -> list[SlotTable]:
        """The block tables, and which layers use which."""
        return [
            SlotTable(
                self._tables[index].blocks,
                self._tables[index].block_size,
                [name for _, names in planners for name in names],
            )
            for index, planners in self._groups
        ]

    def planners(self) -> list[StepPlanner]:
        """The planners of all groups."""
        return [planner for _, planners in self._groups for planner, _ in planners]

    def plan(self, batch: InputBatch) -> dict[str, Any]:
        """Metadata for every layer, from the arrays on the host."""
        device = self._device
        query_start = on_device(batch.query_start, device)
        seq_lens = on_device(batch.seq_lens, device)
        max_query_len = batch.max_query_len
        max_seq_len = batch.max_seq_len
        drafts = batch.num_drafts if self._keeps_states else None
        num_drafts = None if drafts is None else torch.from_numpy(drafts)

        def common(index: int) -> CommonAttentionMetadata:
            table = self._tables[index]
            return CommonAttentionMetadata(
                query_start=query_start,
                seq_lens=seq_lens,
                block_table=on_device(table.rows(batch.slots, max_seq_len), device),
                slot_mapping=on_device(table.slot_mapping(batch.token_slots, batch.positions), device),
                num_requests=len(batch.slots),
                num_tokens=batch.num_tokens,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                block_size=table.block_size,
                num_drafts_host=num_drafts,
            )

        return self.plan_with(common)

    def plan_with(self, common: Callable[[int], CommonAttentionMetadata]) -> dict[str, Any]:
        """Metadata for every layer; `common`: what the planners of the i-th group are told."""
        planned: dict[str, Any] = {}
        for index, planners in self._groups:
            step = common(index)
            for planner, names in planners:
                planned.update(dict.fromkeys(names, planner.build(step)))
        return planned

    def cascades(self, index: int, prefix_len: int, num_requests: int) -> bool:
        """Whether a planner of the i-th group has a prefix of so many tokens attended to once for so many requests."""
        return any(
            planner.cascades(prefix_len, num_requests)
            for group, planners in self._groups
            for planner, _ in planners
            if group == index and isinstance(planner, CascadePlanner)
        )

    def before_replay(self, step: Callable[[int], StepOnHost]) -> None:
        """Have those plan a decode batch that plan on the host; `step`: of the i-th group."""
        for index, planner in self._on_host:
            planner.before_replay(step(index))


def _planners(
    names: Sequence[str], layers: Mapping[str, CacheLayer], device: torch.device
) -> list[tuple[StepPlanner, list[str]]]:
    """Layers of a group that are planned alike share a planner."""
    alike: dict[Hashable, list[str]] = {}
    for name in names:
        alike.setdefault(layers[name].planning(), []).append(name)
    return [(layers[members[0]].planner(device), members) for members in alike.values()]
