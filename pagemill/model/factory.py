"""`load_model`: from facts and settings to a model ready to run. Chooses the parts; each does its own work."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from pagemill.artifacts.config_fields import ModelFields
from pagemill.catalog.heads import HEADS
from pagemill.catalog.models import ENCODERS, HOSTS, MODELS
from pagemill.catalog.weights import DUMMY, SHARDED_STATE, weights_source
from pagemill.config.choices import Convert
from pagemill.config.facts import ModelFacts
from pagemill.config.pooling_facts import HeadFacts
from pagemill.config.sections import CacheSettings, ModelConfig
from pagemill.errors import ConfigError, ModelError, PagemillError
from pagemill.model.attention.capability import AttentionContext
from pagemill.model.attention.selector import BackendPreferences, BackendSelector
from pagemill.model.distributed.parallel_groups import ParallelGroups, solo_groups
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.exchange import Exchange
from pagemill.model.layers.pooling_head import HeadLayer, PoolingHead, TokenChoiceHead
from pagemill.model.loading.file_tensor import FileTensor
from pagemill.model.loading.load_place import LoadPlace
from pagemill.model.loading.load_weights import Source, load_weights
from pagemill.model.loading.part import Select, whole
from pagemill.model.loading.shards import MAX_FILE_BYTES, PATTERN, checked_pattern
from pagemill.model.loading.uploads import Uploads, uploads_to
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.network.row_wise import require_row_wise
from pagemill.model.quantization.choose import choose as choose_quantization
from pagemill.platforms.interface import Platform
from pagemill.utils.timing import PhaseTimer

DEFAULT_CACHE = CacheSettings()
LEFT_IN_FILES = ("safetensors", SHARDED_STATE)
"""Formats of which a source yields `FileTensor`s, which cost nothing before they are read."""


def load_model(
    facts: ModelFacts,
    config: ModelConfig,
    platform: Platform,
    timer: PhaseTimer,
    groups: ParallelGroups | None = None,
    cache: CacheSettings = DEFAULT_CACHE,
    expert_parallel: bool = False,
    embeds_at_end: bool = False,
) -> CausalLM:
    """A model ready to run, in config.dtype; with `groups`, this rank's part of one, whole experts where
    `expert_parallel`, on the last pipeline stage the embeddings too where `embeds_at_end`. Raises ModelError for files
    that do not fit the architecture, ConfigError when it cannot be split over the groups."""
    device = torch.device(platform.torch_device())
    groups = groups or solo_groups()
    with uploads_to(device, platform.copier()) as uploads:
        place = _place(config, device, groups, leaves_in_files=uploads is not None)
        source = _source(facts, config, place)
        if uploads is not None and _reads_all(facts, config, groups, expert_parallel):
            source = _guessed(source, uploads)
        # What layers make for themselves, such as rotary tables, is made where it is used.
        with timer.phase("build"), device, _buildable(facts):
            model = build_model(facts, config, platform, groups, cache, expert_parallel, embeds_at_end).eval()
        with timer.phase("weights"):
            shows_progress = config.use_tqdm_on_load and place.rank == 0
            load_weights(model, source, device, uploads=uploads, shows_progress=shows_progress)
    return model


def _reads_all(facts: ModelFacts, config: ModelConfig, groups: ParallelGroups, expert_parallel: bool) -> bool:
    """Whether a rank will read everything that the files have, or nearly: that is known before the model is."""
    is_alone = groups.tp.size * groups.pp.size == 1 and not (expert_parallel and groups.dp.size > 1)
    return is_alone and config.load_format != DUMMY and facts.weights_format in LEFT_IN_FILES


def save_sharded_state(
    facts: ModelFacts,
    config: ModelConfig,
    platform: Platform,
    groups: ParallelGroups,
    folder: Path,
    cache: CacheSettings = DEFAULT_CACHE,
    expert_parallel: bool = False,
    pattern: str = PATTERN,
    max_bytes: int = MAX_FILE_BYTES,
    embeds_at_end: bool = False,
) -> list[str]:
    """Write what this rank reads of a checkpoint into files of its own, and with the first rank what else the model's
    folder says; the names of the files. Raises ConfigError for a folder that cannot be written, and a model that
    cannot be saved so."""
    from pagemill.model.loading.save_shards import copy_descriptions, save_shards  # deferred: safetensors.torch

    if Path(facts.path).is_file():
        raise ConfigError("a sharded state is saved from safetensors: every rank reads its own part of a GGUF file")
    if expert_parallel and groups.dp.size > 1:
        raise ConfigError("experts that are spread over several engines are not saved as a sharded state")
    place = _place(config, torch.device("cpu"), groups)
    if place.rank == 0:
        copy_descriptions(Path(facts.path), folder)
    with torch.device(platform.torch_device()):
        empty = build_model(facts, config, platform, groups, cache, expert_parallel, embeds_at_end)
    return save_shards(empty, _source(facts, config, place), folder, place, checked_pattern(pattern), max_bytes)


def _guessed(source: Source, uploads: Uploads) -> Source:
    """The same, of which as much as may be is under way already; its files are not looked through again. A source that
    fails does so when it is asked for what is wanted."""
    found: list[tuple[str, FileTensor]] = []
    others: list[str] = []

    def noted() -> Iterator[FileTensor]:
        for name, tensor in source(whole):
            if isinstance(tensor, FileTensor):
                found.append((name, tensor))
                yield tensor
            else:
                others.append(name)

    def select_found(select: Select) -> Iterator[tuple[str, FileTensor | Tensor]]:
        for name, tensor in found:
            part = select(name, tensor.shape)
            if part is not None:
                yield name, tensor if part.covers(tensor.shape) else part.of(tensor.read())

    tensors = noted()
    try:
        uploads.guess(tensors)
        for _tensor in tensors:  # those for which there is no memory yet
            pass
    except PagemillError:
        return source
    return source if others else select_found


def _place(
    config: ModelConfig, device: torch.device, groups: ParallelGroups, *, leaves_in_files: bool = False
) -> LoadPlace:
    rank = groups.pp.rank * groups.tp.size + groups.tp.rank
    world_size = groups.tp.size * groups.pp.size
    return LoadPlace(device, rank, world_size, config.model_loader_extra_config, leaves_in_files)


def _source(facts: ModelFacts, config: ModelConfig, place: LoadPlace) -> Source:
    name = DUMMY if config.load_format == DUMMY else facts.weights_format
    function = weights_source(name)
    dtype = getattr(torch, config.dtype)
    return lambda select: function(facts, dtype, config.seed, select, place)


@contextlib.contextmanager
def _buildable(facts: ModelFacts) -> Iterator[None]:
    """Sizes that are allowed one by one may be too much together, or not go together: that is the model's fault."""
    try:
        yield
    except (ArithmeticError, IndexError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, PagemillError):
            raise
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{facts.name}: a model of the sizes in its config cannot be built: {why[0][:200]}") from error


def build_model(
    facts: ModelFacts,
    config: ModelConfig,
    platform: Platform,
    groups: ParallelGroups,
    cache: CacheSettings = DEFAULT_CACHE,
    expert_parallel: bool = False,
    embeds_at_end: bool = False,
) -> CausalLM:
    """The architecture without weights."""
    hosted = facts.implementation in HOSTS
    known = HEADS if facts.architecture in HEADS else ENCODERS if facts.is_encoder else MODELS
    if not hosted and facts.architecture not in known:
        raise ModelError(f"architecture {facts.architecture!r} is not supported; supported: {', '.join(sorted(known))}")
    attention = attention_chooser(config, cache, platform)
    dtype = getattr(torch, config.dtype)
    quantization = choose_quantization(
        config.quantization, facts.quantization_config, dtype, platform.torch_device(), config.deterministic
    )
    exchange = Exchange(groups.dp, groups.ep) if expert_parallel and groups.dp.size > 1 else None
    ctx = LayerContext(dtype, quantization, attention, groups, expert_parallel, exchange, embeds_at_end=embeds_at_end)
    facts = dataclasses.replace(facts, hf_config=ModelFields(facts.hf_config))  # a plain dict in another process
    implementation = HOSTS.resolve(facts.implementation) if hosted else known.resolve(facts.architecture)
    model: CausalLM = implementation(facts, config.max_model_len, ctx)
    if config.deterministic:
        require_row_wise(model.network)
    if config.pools:
        _make_pool(model, facts.head, config.convert, dataclasses.replace(ctx, names=model.weights))
    return model


def _make_pool(model: CausalLM, head: HeadFacts | None, convert: Convert, ctx: LayerContext) -> None:
    """Give a model the head that follows pooling, where one is asked for, in place of its output head."""
    wanted = head if head is not None and (head.embeds or convert is not Convert.EMBED) else None
    if wanted is None or not wanted.token_ids:
        model.drop_head()
    if wanted is None or not model.is_last:
        return
    if wanted.token_ids:
        model.pooling_head = TokenChoiceHead(model.compute_logits, wanted.token_ids, ctx.dtype, wanted.difference)
        return
    layers = [HeadLayer("linear", wanted.num_outputs, bias=False)]
    if not wanted.embeds:
        layers = list(model.head_layers(wanted.num_outputs, wanted.per_token))
    model.pooling_head = PoolingHead(model.hidden_size, layers, ctx=ctx)


def attention_chooser(config: ModelConfig, cache: CacheSettings, platform: Platform) -> BackendSelector:
    """Chooses the backends that the settings and the platform ask for."""
    wanted = config.attention_config
    preferences = BackendPreferences(
        config.attention_backend or wanted.backend,
        wanted.prefill_backend,
        wanted.decode_backend,
        {pattern: str(name) for pattern, name in wanted.layer_backends.items()},
    )
    where = AttentionContext(
        compute=platform.facts().capability,
        kv_cache_dtype=cache.kv_cache_dtype,
        block_size=cache.block_size,
        flash_attn_version=wanted.flash_attn_version,
        deterministic=config.deterministic,
    )
    return BackendSelector(platform.torch_device(), config.dtype, platform.attention_order(), preferences, where)
