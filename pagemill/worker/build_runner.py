"""`build_runner`: from a planned cache and a loaded model to a runner; which parts it has depends on the device.

Knows the parts by what they need, and devices by what they offer.
"""

from dataclasses import dataclass

import torch

from pagemill.config.compilation import is_cut
from pagemill.config.graph_mode import GraphMode
from pagemill.config.sections import CompilationConfig, SchedulerConfig
from pagemill.log import get_logger
from pagemill.messages.kv_spec import KVCacheConfig
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import MetadataBuilder
from pagemill.model.attention.layer import Attention
from pagemill.model.distributed.group import Group
from pagemill.model.models.causal_lm import CausalLM
from pagemill.platforms.interface import Platform
from pagemill.worker.batch.block_tables import BlockTable, BlockTables
from pagemill.worker.batch.device_tables import DeviceBlockTable
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.forward.device import DeviceForward
from pagemill.worker.forward.device_batch import DeviceBatch
from pagemill.worker.forward.host import HostForward
from pagemill.worker.forward.interface import Forward
from pagemill.worker.forward.pooling import PoolingForward
from pagemill.worker.forward.step_graphs import StepGraphs
from pagemill.worker.graphs.dispatcher import BatchLimits, Dispatcher
from pagemill.worker.graphs.downgrade import downgrade
from pagemill.worker.graphs.graph_runner import GraphRunner, Graphs, NoGraphs
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.model_runner import ModelRunner
from pagemill.worker.pipeline.linked_stage import LinkedStage
from pagemill.worker.pipeline.stage import SoloStage, Stage
from pagemill.worker.pooling.pooler import Pooler
from pagemill.worker.sampling.sampler import Sampler

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    """What a runner has room for."""

    max_num_seqs: int
    max_model_len: int
    max_step_tokens: int

    @classmethod
    def of(cls, scheduler: SchedulerConfig, max_model_len: int) -> "RunnerSizes":
        """From resolved settings."""
        most = max(scheduler.max_num_batched_tokens or 0, scheduler.max_num_seqs)
        return cls(scheduler.max_num_seqs, max_model_len, most)


def build_runner(
    plan: KVCacheConfig,
    model: CausalLM,
    platform: Platform,
    sizes: RunnerSizes,
    compilation: CompilationConfig,
    stages: Group | None = None,
    *,
    pools: bool = False,
) -> ModelRunner:
    """A runner for layers that are bound to their cache; `stages`: the pipeline, where there is one. `pools`: prompts
    become vectors, and no token is sampled."""
    device = platform.torch_device()
    states = RequestStates(sizes.max_num_seqs, sizes.max_model_len)
    if stages is not None and stages.size > 1:
        stage: Stage = LinkedStage(stages, states, hidden_size=model.hidden_size, dtype=model.dtype, device=device)
    else:
        stage = SoloStage()
    if platform.runs_ahead and isinstance(stage, SoloStage) and not pools:
        tables, forward = _on_device(plan, model, platform, sizes, states, compilation)
    else:
        tables, forward = _on_host(plan, model, platform, sizes, states, stage, pools)
    return ModelRunner(states, tables, stage, forward)


def _on_host(
    plan: KVCacheConfig,
    model: CausalLM,
    platform: Platform,
    sizes: RunnerSizes,
    states: RequestStates,
    stage: Stage,
    pools: bool,
) -> tuple[BlockTables, Forward]:
    device = platform.torch_device()
    tables = BlockTables(
        tuple(BlockTable(sizes.max_num_seqs, sizes.max_model_len, group.spec.block_size) for group in plan.groups)
    )
    groups = AttentionGroups(plan, model.cache_layers(), tables, device)
    if pools:
        pooler = Pooler(sizes.max_num_seqs, model.hidden_size, torch.device(device))
        return tables, PoolingForward(model, groups, pooler, stage, torch.device(device))
    return tables, HostForward(model, groups, Sampler(states), stage, torch.device(device))


def _on_device(
    plan: KVCacheConfig,
    model: CausalLM,
    platform: Platform,
    sizes: RunnerSizes,
    states: RequestStates,
    compilation: CompilationConfig,
) -> tuple[BlockTables, Forward]:
    device = torch.device(platform.torch_device())
    tables = tuple(
        DeviceBlockTable(sizes.max_num_seqs, sizes.max_model_len, group.spec.block_size, device)
        for group in plan.groups
    )
    groups = AttentionGroups(plan, model.cache_layers(), BlockTables(tables), platform.torch_device())
    settings = GraphSettings(compilation, sizes.max_num_seqs)
    most_rows = max(sizes.max_num_seqs, *settings.capture_sizes, 1)
    batch = DeviceBatch(max(sizes.max_step_tokens, most_rows), most_rows, tables, device)
    graphs = StepGraphs(_graphs(groups, model, platform, settings))
    forward = DeviceForward(model, states, batch, groups, Sampler(states), platform.transfers(), graphs, device)
    return BlockTables(tables), forward


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What is wished of graphs, before it is known what attention can."""

    compilation: CompilationConfig
    max_num_seqs: int

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens for which there are graphs."""
        return self.compilation.cudagraph_capture_sizes or ()


def _graphs(groups: AttentionGroups, model: CausalLM, platform: Platform, settings: GraphSettings) -> Graphs:
    maker = platform.graph_maker()
    support = {type(planner).__name__: _graph_support(planner) for planner in groups.planners()}
    pieces = is_cut(settings.compilation) and all(
        isinstance(layer, Attention) for layer in model.cache_layers().values()
    )
    wanted = GraphMode[settings.compilation.cudagraph_mode or GraphMode.NONE.value]
    mode, reason = downgrade(wanted, support, pieces=pieces)
    if reason:
        logger.info("CUDA graphs: %s instead of %s: %s", mode.value, wanted.value, reason)
    if maker is None or mode is GraphMode.NONE:
        return NoGraphs()
    return GraphRunner(
        Dispatcher(mode, settings.capture_sizes, BatchLimits(settings.max_num_seqs)),
        maker,
        num_warm_ups=settings.compilation.cudagraph_num_of_warmups,
        lazy=settings.compilation.cudagraph_lazy_capture,
    )


def _graph_support(planner: object) -> AttentionCGSupport:
    return planner.graph_support if isinstance(planner, MetadataBuilder) else AttentionCGSupport.NEVER
