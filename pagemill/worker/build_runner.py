"""`build_runner`: from a planned cache and a loaded model to a runner; which parts it has depends on the device.

Knows the parts by what they need, and devices by what they offer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagemill.catalog.proposers import load_proposer
from pagemill.config.graph_config import GraphConfig
from pagemill.config.pooling_facts import Activation
from pagemill.config.sections import SchedulerConfig
from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import KVCacheConfig, MambaSpec
from pagemill.model.attention.state_layer import StateLayer
from pagemill.model.distributed.group import Group
from pagemill.model.models.causal_lm import CausalLM
from pagemill.platforms.interface import GraphMaker, Platform
from pagemill.worker.batch.block_tables import BlockTable, BlockTables
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.extensions.host import WorkerExtensions
from pagemill.worker.extensions.interface import WorkerContext
from pagemill.worker.forward.host import HostForward
from pagemill.worker.forward.interface import Forward
from pagemill.worker.forward.pooling import PoolingForward
from pagemill.worker.graphs.dispatcher import BatchLimits
from pagemill.worker.graphs.factory import make_graphs
from pagemill.worker.graphs.graph_runner import Graphs
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.model_runner import ModelRunner
from pagemill.worker.native.decode_path import native_decode
from pagemill.worker.pipeline.linked_stage import LinkedStage
from pagemill.worker.pipeline.stage import SoloStage, Stage
from pagemill.worker.pooling.pooler import Pooler
from pagemill.worker.sampling.sampler import Sampler, SamplerOptions
from pagemill.worker.spec_decode.acceptance import draft_draws
from pagemill.worker.spec_decode.drafts import SlotDrafts
from pagemill.worker.spec_decode.hidden_states import HiddenStates, WantedHidden
from pagemill.worker.spec_decode.interface import DraftNetwork, NoProposer, Proposer, ProposerContext, Speculation
from pagemill.worker.spec_decode.load_draft import LoadedDraft
from pagemill.worker.spec_decode.stage_states import StageStates

DEFAULT_SAMPLING = SamplerOptions()
FEWER_DRAFTS = (2, 5)
"""Of a request, for which steps on a device have graphs beside those for the most drafts; other numbers pad."""
MAX_VERIFY_LEN = 16
"""Tokens of a request beyond which a step that verifies drafts is as any other."""
VERIFY_TOKENS = 512
"""Of a step that verifies drafts, beyond which launching its kernels hides behind running them."""


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    """What a runner has room for."""

    max_num_seqs: int
    max_model_len: int
    max_step_tokens: int

    @classmethod
    def of(cls, scheduler: SchedulerConfig, max_model_len: int) -> "RunnerSizes":
        """From the settings of the scheduler."""
        most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        return cls(scheduler.max_num_seqs, max_model_len, most)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What a runner does beyond what every one does."""

    pools: bool = False
    """Prompts become vectors, and no token is sampled."""
    cascades: bool = False
    """Keys that all requests share are attended to once, where a backend can."""
    speculation: Speculation | None = None
    """Drafts are proposed, and verified by the next step; None: each step samples one token of a slot."""
    draft: LoadedDraft | None = None
    """The model that proposes drafts, where one does; its layers are bound to the same cache."""
    activation: Activation = Activation.NONE
    """Of what a head after pooling gives."""


DEFAULTS = RunnerOptions()


@dataclass(frozen=True, slots=True)
class BoundCache:
    """The KV cache that a model's layers are bound to."""

    plan: KVCacheConfig
    tensors: Sequence[Tensor]
    """Each [num_blocks * page_bytes] uint8."""


def build_runner(
    cache: BoundCache,
    model: CausalLM,
    platform: Platform,
    sizes: RunnerSizes,
    graphs: GraphConfig,
    stages: Group | None = None,
    rank: int = 0,
    *,
    ranks: Group | None = None,
    sampling: SamplerOptions = DEFAULT_SAMPLING,
    options: RunnerOptions = DEFAULTS,
) -> ModelRunner:
    """A runner for layers that are bound to their cache; `stages`: the pipeline, where there is one; `rank`: of the
    worker; `ranks`: those that compute each layer with it. `sampling`: what settings say of it. Raises ConfigError for
    a model that cannot be compiled as `graphs` asks, for a step extension that cannot be imported, and for drafts where
    nothing can verify them."""
    plan = cache.plan
    device = platform.torch_device()
    states = _states(sizes)
    extensions = WorkerExtensions.load(
        WorkerContext(states, cache.tensors, plan.num_blocks, model.vocab_size, torch.device(device))
    )
    make_sampler = partial(
        Sampler,
        states,
        model.vocab_size,
        processors=sampling.processors,
        extensions=extensions.by_name,
        logprobs_mode=sampling.logprobs_mode,
        draft_draws=None if options.speculation is None else draft_draws(options.speculation, states),
    )
    if stages is not None and stages.size > 1:
        stage: Stage = LinkedStage(stages, states, hidden_size=model.hidden_size, dtype=model.dtype, device=device)
    else:
        stage = SoloStage()
    pools = options.pools
    ahead = platform.runs_ahead and isinstance(stage, SoloStage) and not pools
    asked = options.speculation is not None and not options.speculation.by_default
    if asked:
        _check_verifiable(plan, pools, ahead)
    proposer, wanted, options = _proposing(options, stage)
    if ahead:
        verify_lens = lens_of(0 if options.speculation is None else options.speculation.max_drafts)
        maker = platform.graph_maker()
        made = _graphs(model, sizes, maker, graphs, rank, verify_lens)
        tables, forward, hidden = _on_device(plan, model, platform, sizes, states, made, make_sampler, options, wanted)
    else:
        maker = None
        made = _graphs(model, sizes, None, graphs, rank)
        tables, forward, hidden = _on_host(
            plan, model, platform, sizes, states, stage, made, make_sampler, options, wanted
        )
    drafts = None
    if proposer is not None and (asked or forward.decodes_natively):
        captures = maker if made.num_keys else None
        network = _draft_network(plan, options, states, tables, platform, captures, hidden, forward)
        drafts = _drafts(proposer, options, states, network, ranks, model, hidden)
    return ModelRunner(states, tables, stage, forward, extensions, drafts)


def _states(sizes: RunnerSizes) -> RequestStates:
    try:
        return RequestStates(sizes.max_num_seqs, sizes.max_model_len)
    except (MemoryError, ValueError) as error:  # ValueError: more than numpy can count
        raise ConfigError(
            f"max_num_seqs={sizes.max_num_seqs} with max_model_len={sizes.max_model_len}: there is no memory for the "
            "tokens of so many requests; lower --max-num-seqs"
        ) from error


def lens_of(max_drafts: int) -> tuple[int, ...]:
    """Tokens of a request to which steps that verify drafts are padded, ascending: those of the most drafts that there
    may be, and of 2 and 5."""
    lens = {1 + count for count in (*FEWER_DRAFTS, max_drafts) if count <= max_drafts}
    return tuple(sorted(length for length in lens if 1 < length <= MAX_VERIFY_LEN))


def _check_verifiable(plan: KVCacheConfig, pools: bool, ahead: bool) -> None:
    """Raise ConfigError where drafts cannot be verified. `pools`: no token is sampled; `ahead`: steps are queued on a
    device."""
    if pools:
        raise ConfigError("drafts are verified by a model that samples tokens")
    states = [name for group in plan.groups if isinstance(group.spec, MambaSpec) for name in group.layers]
    if states and ahead:
        raise ConfigError(f"layer {states[0]!r} keeps a state, from which drafts are taken back on CPUs only")


def _proposer(speculation: Speculation | None) -> type[Proposer] | None:
    if speculation is None:
        return None
    made = load_proposer(speculation.proposer, speculation.custom_class)
    if not (isinstance(made, type) and issubclass(made, Proposer)):
        raise ConfigError(
            f"proposer {speculation.custom_class or speculation.proposer!r} is no Proposer (docs/plug-ins.md)"
        )
    return made


def _proposing(
    options: RunnerOptions, stage: Stage
) -> tuple[type[Proposer] | None, WantedHidden | None, RunnerOptions]:
    """Who proposes, what that reads of the layers here, and the options, changed on a stage that is told of drafts by
    the one that samples."""
    speculation = options.speculation
    proposer = _proposer(speculation)
    if proposer is None or speculation is None:
        return None, None, options
    wanted = None
    if stage.samples:
        wanted = proposer.wants(None if options.draft is None else options.draft.model)
    layers = stage.told(() if wanted is None else wanted.layers)
    if stage.samples:
        return proposer, wanted, options
    wanted = WantedHidden(layers=layers) if layers else None
    return NoProposer, wanted, replace(options, speculation=replace(speculation, adaptive=False))


def _drafts(
    proposer: type[Proposer],
    options: RunnerOptions,
    states: RequestStates,
    network: DraftNetwork | None,
    ranks: Group | None,
    model: CausalLM,
    hidden: HiddenStates | None,
) -> SlotDrafts | None:
    speculation = options.speculation
    if speculation is None:
        return None
    context = ProposerContext(states, speculation.max_drafts, speculation, network, hidden)
    steps = None if network is None else network.steps
    return SlotDrafts(states, proposer(context), speculation, ranks, model.vocab_size, _state_layers(model), steps)


def _state_layers(model: CausalLM) -> list[StateLayer]:
    return [layer for layer in model.cache_layers().values() if isinstance(layer, StateLayer)]


def _draft_network(
    plan: KVCacheConfig,
    options: RunnerOptions,
    states: RequestStates,
    tables: BlockTables,
    platform: Platform,
    maker: GraphMaker | None,
    hidden: HiddenStates | None,
    forward: Forward,
) -> DraftNetwork | None:
    """The model that proposes, where there is one; `forward` is told of it. `maker`: where steps are captured."""
    if options.draft is None or options.speculation is None:
        return None
    draft = options.draft.model
    device = torch.device(platform.torch_device())
    groups = AttentionGroups(plan, draft.cache_layers(), tables, platform.torch_device())
    network = DraftNetwork(draft, groups, tables, options.draft.max_model_len, device)
    count = options.speculation.max_drafts
    if forward.behind is None or count >= MAX_VERIFY_LEN:
        return network
    # Deferred: hosts never need it.
    from pagemill.worker.forward.guess_graphs import GuessParts
    from pagemill.worker.forward.guess_kinds import guess_graphs

    num_slots = len(states.num_tokens)
    most = min(num_slots, max(VERIFY_TOKENS // (1 + count), 1))
    parts = GuessParts(network, hidden, platform.transfers(), maker, num_slots, most, count)
    steps = guess_graphs(parts)
    if steps is not None:
        forward.behind.guess_with(steps, parts.transfers)
    return replace(network, steps=steps)


def _on_host(
    plan: KVCacheConfig,
    model: CausalLM,
    platform: Platform,
    sizes: RunnerSizes,
    states: RequestStates,
    stage: Stage,
    graphs: Graphs,
    make_sampler: Callable[..., Sampler],
    options: RunnerOptions,
    wanted: WantedHidden | None,
) -> tuple[BlockTables, Forward, HiddenStates | None]:
    device = platform.torch_device()
    tables = BlockTables(
        tuple(BlockTable(sizes.max_num_seqs, sizes.max_model_len, group.spec.block_size) for group in plan.groups)
    )
    groups = AttentionGroups(plan, model.cache_layers(), tables, device)
    if options.pools:
        head = model.pooling_head
        width = None if head is None else head.num_outputs
        pooler = Pooler(sizes.max_num_seqs, model.hidden_size, torch.device(device), head, width, options.activation)
        return tables, PoolingForward(model, groups, pooler, stage, torch.device(device)), None
    hidden: HiddenStates | None = None
    if wanted is not None:
        where = torch.device(device)
        hidden = HiddenStates(wanted, model, None, where) if stage.alone else StageStates(wanted, model, where)
    network = graphs.wrap_model(model)
    native = native_decode(model, network, states, groups, torch.device(device))
    forward = HostForward(model, network, groups, states, make_sampler(), stage, torch.device(device), native, hidden)
    return tables, forward, hidden


def _on_device(
    plan: KVCacheConfig,
    model: CausalLM,
    platform: Platform,
    sizes: RunnerSizes,
    states: RequestStates,
    graphs: Graphs,
    make_sampler: Callable[..., Sampler],
    options: RunnerOptions,
    wanted: WantedHidden | None,
) -> tuple[BlockTables, Forward, HiddenStates | None]:
    # Deferred: hosts never need them, and shall start fast.
    from pagemill.worker.batch.device_tables import DeviceBlockTable
    from pagemill.worker.forward.device import DeviceForward
    from pagemill.worker.forward.device_batch import DeviceBatch
    from pagemill.worker.forward.shared_prefix import SharedPrefix
    from pagemill.worker.forward.step_graphs import StepGraphs
    from pagemill.worker.sampling.history import DeviceHistory

    device = torch.device(platform.torch_device())
    tables = tuple(
        DeviceBlockTable(sizes.max_num_seqs, sizes.max_model_len, group.spec.block_size, device)
        for group in plan.groups
    )
    groups = AttentionGroups(plan, model.cache_layers(), BlockTables(tables), platform.torch_device())
    most_requests = max(sizes.max_num_seqs, graphs.max_num_tokens)
    most_tokens = max(sizes.max_step_tokens, most_requests)
    drafts = 0 if options.speculation is None else options.speculation.max_drafts
    most_rows = max(most_requests, min(sizes.max_num_seqs * (1 + drafts), most_tokens)) if drafts else 0
    batch = DeviceBatch(most_tokens, most_requests, tables, device, most_rows)
    history = DeviceHistory(sizes.max_num_seqs, model.vocab_size, device, counts_ahead=not drafts)
    sampler = make_sampler(device=device, history=history)
    room = most_tokens, most_requests + most_rows
    hidden = None if wanted is None else HiddenStates(wanted, model, room, device)
    forward = DeviceForward(
        model,
        states,
        batch,
        groups,
        sampler,
        platform.transfers(),
        StepGraphs(graphs, lens_of(drafts)),
        device,
        SharedPrefix(tables, groups) if options.cascades else None,
        hidden,
    )
    return BlockTables(tables), forward, hidden


def _graphs(
    model: CausalLM,
    sizes: RunnerSizes,
    maker: GraphMaker | None,
    config: GraphConfig,
    rank: int,
    verify_lens: tuple[int, ...] = (),
) -> Graphs:
    verify_tokens = min(VERIFY_TOKENS, sizes.max_step_tokens)
    return make_graphs(
        config,
        model.cache_layers(),
        BatchLimits(sizes.max_num_seqs, verify_lens=verify_lens, verify_tokens=verify_tokens),
        maker,
        rank=rank,
    )
