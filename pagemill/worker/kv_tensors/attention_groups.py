"""One planner per KV group and kind of layer: a step is planned once per group, not once per layer."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from pagemill.messages.kv_spec import KVCacheConfig
from pagemill.model.attention.interface import CacheLayer, CommonAttentionMetadata, StepPlanner
from pagemill.worker.batch.block_tables import BlockTables
from pagemill.worker.batch.input_batch import InputBatch


class AttentionGroups:
    """Plans a batch: layer name -> metadata, for the layers of this pipeline stage. A layer that reads another's cache
    is in that one's group."""

    def __init__(self, plan: KVCacheConfig, layers: Mapping[str, CacheLayer], tables: BlockTables, device: str) -> None:
        groups = [
            (
                table,
                _planners(
                    [name for owner in group.layers if owner in layers for name in (owner, *plan.readers(owner))],
                    layers,
                    device,
                ),
            )
            for group, table in zip(plan.groups, tables.groups, strict=True)
        ]
        self._groups = [(table, planners) for table, planners in groups if planners]

    def plan(self, batch: InputBatch) -> dict[str, Any]:
        """Metadata for every layer."""
        query_start = torch.from_numpy(batch.query_start)
        seq_lens = torch.from_numpy(batch.seq_lens)
        max_query_len = int((batch.query_start[1:] - batch.query_start[:-1]).max())
        max_seq_len = int(batch.seq_lens.max())
        planned: dict[str, Any] = {}
        for table, planners in self._groups:
            common = CommonAttentionMetadata(
                query_start=query_start,
                seq_lens=seq_lens,
                block_table=torch.from_numpy(table.rows(batch.slots, max_seq_len)),
                slot_mapping=torch.from_numpy(table.slot_mapping(batch.token_slots, batch.positions)),
                num_requests=len(batch.slots),
                num_tokens=batch.num_tokens,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                block_size=table.block_size,
            )
            for planner, names in planners:
                planned.update(dict.fromkeys(names, planner.build(common)))
        return planned


def _planners(
    names: Sequence[str], layers: Mapping[str, CacheLayer], device: str
) -> list[tuple[StepPlanner, list[str]]]:
    """Layers of a group that are planned alike share a planner."""
    alike: dict[Hashable, list[str]] = {}
    for name in names:
        alike.setdefault(layers[name].planning(), []).append(name)
    return [(layers[members[0]].planner(torch.device(device)), members) for members in alike.values()]
