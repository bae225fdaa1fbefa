"""One metadata builder per KV group and backend: a step is planned once per group, not once per layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pagemill.messages.kv_spec import KVCacheConfig
from pagemill.model.attention.interface import CommonAttentionMetadata, MetadataBuilder
from pagemill.model.attention.layer import Attention
from pagemill.worker.batch.block_tables import BlockTables
from pagemill.worker.batch.input_batch import InputBatch


class AttentionGroups:
    """Plans attention for a batch: layer name -> metadata, for the layers that this pipeline stage has."""

    def __init__(self, plan: KVCacheConfig, layers: Mapping[str, Attention], tables: BlockTables, device: str) -> None:
        groups = [
            (table, _builders([name for name in group.layers if name in layers], layers, device))
            for group, table in zip(plan.groups, tables.groups, strict=True)
        ]
        self._groups = [(table, builders) for table, builders in groups if builders]

    def plan(self, batch: InputBatch) -> dict[str, Any]:
        """Metadata for every attention layer."""
        query_start = torch.from_numpy(batch.query_start)
        seq_lens = torch.from_numpy(batch.seq_lens)
        max_query_len = int((batch.query_start[1:] - batch.query_start[:-1]).max())
        max_seq_len = int(batch.seq_lens.max())
        planned: dict[str, Any] = {}
        for table, builders in self._groups:
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
            for builder, names in builders:
                planned.update(dict.fromkeys(names, builder.build(common)))
        return planned


def _builders(
    names: Sequence[str], layers: Mapping[str, Attention], device: str
) -> list[tuple[MetadataBuilder, list[str]]]:
    """Layers of a group that are planned alike share a builder."""
    shared: dict[Any, list[str]] = {}
    for name in names:
        layer = layers[name]
        shared.setdefault((layer.backend, layer.spec), []).append(name)
    return [
        (backend.metadata_builder(spec, torch.device(device)), members) for (backend, spec), members in shared.items()
    ]
