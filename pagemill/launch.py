"""Composition: from settings to a complete configuration, and to a running engine in this process."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from pagemill import envs
from pagemill.artifacts.describe import describe, locate
from pagemill.artifacts.heads import describe_head, head_method, speculator_of
from pagemill.artifacts.row_heads import describe_row_heads, row_heads_method
from pagemill.catalog.executors import UNI
from pagemill.catalog.heads import DFLASH, EAGLE, EAGLE3, MTP, PEAGLE, ROW_HEADS
from pagemill.catalog.quantization import check_quantization
from pagemill.catalog.vllm_environment import why_unread
from pagemill.catalog.weights import DUMMY, check_load_format
from pagemill.config.arguments import EngineArgs
from pagemill.config.engine_config import EngineConfig
from pagemill.config.facts import ModelFacts
from pagemill.config.fleet_plan import IN_PROCESS, FleetPlan
from pagemill.config.no_effect import IdleSetting, Place, idle_settings
from pagemill.config.resolve import resolve
from pagemill.config.rules.draft import draft_source
from pagemill.config.rules.speculation import merged
from pagemill.config.sections import EngineSettings, ModelSettings
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.factory import make_executor
from pagemill.errors import ConfigError, ModelError
from pagemill.log import get_logger
from pagemill.messages.core_api import CoreApi
from pagemill.messages.engine_io import EngineReady
from pagemill.observability.start_table import start_table
from pagemill.platforms.choose import choose_platform
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.inproc import InprocClient
from pagemill.serve.processing.seeds import RequestSeeds
from pagemill.tokenizers.interface import Tokenizer
from pagemill.tokenizers.load import tokenizer_of
from pagemill.tokenizers.same_tokens import check_same_tokens
from pagemill.utils.gc_pause import gc_paused
from pagemill.utils.text import shown
from pagemill.utils.timing import PhaseTimer
from pagemill.utils.torch_libraries import load_torch_library, source_only

logger = get_logger(__name__)

WORKER = "pagemill.worker.begin:make_worker"
"""What makes a worker, called with its configuration."""


@dataclass(frozen=True)
class LaunchedEngine:
    """A running engine in this process, with what its users ask about it."""

    llm: AsyncLLM
    config: EngineConfig
    tokenizer: Tokenizer

    @property
    def facts(self) -> ModelFacts:
        """What the model's files say."""
        return self.config.facts


def build_config(args: EngineArgs, fleet: FleetPlan = IN_PROCESS) -> EngineConfig:
    """Find the model, ask the machine, and complete the settings. `fleet`: the server's engines, of which those of this
    machine are configured. The decisions that matter are logged as a table, all of them at DEBUG."""
    settings = args.settings
    model = settings.model
    if model.quantization is not None:
        check_quantization(model.quantization)
    check_load_format(model.load_format)
    path = _located(model)
    settings, path = _paired(settings, path)
    model = settings.model
    facts = describe(
        model.model,
        path,
        hf_overrides=model.hf_overrides,
        generation_config=model.generation_config,
        override_generation_config=model.override_generation_config,
        load_format=model.load_format,
        model_impl=model.model_impl,
    )
    device = choose_platform(settings.device.device).facts()
    config, decisions = resolve(settings, facts, device, fleet, _draft_facts(settings, facts))
    for decision in decisions:
        logger.debug("%s = %s (%s)", decision.field, decision.value, decision.why)
    idle = idle_settings(args.given, Place(device.kind, config.model, config.cache))
    idle += [IdleSetting(name, why_unread(name)) for name in envs.unread()]
    table = start_table(decisions, idle)
    if table:
        logger.info("%s\n%s", facts.name, table)
    if facts.unused_generation_defaults:
        values = ", ".join(f"{name}={shown(value)}" for name, value in facts.unused_generation_defaults.items())
        logger.warning(
            "%s recommends %s for sampling, which has no effect yet: answers may differ from those of other servers",
            facts.name,
            values,
        )
    return config


def _paired(settings: EngineSettings, path: Path) -> tuple[EngineSettings, Path]:
    """The settings with the method of a head that is named without one; and where the model is a checkpoint of
    `speculators`, with the model that it is for, and it as the head. `path`: of the model. Raises ConfigError where
    something else is asked for as well."""
    model = settings.model
    asked = settings.speculation
    found = speculator_of(path)
    if found is not None:
        given = asked.speculative_config
        named = asked.spec_model or given.model
        if named not in (None, model.model):
            raise ConfigError(
                f"model={model.model!r} is a head for {found.verifier}, and model={named!r} of speculative_config is "
                "another one; give one"
            )
        count = given.num_speculative_tokens or asked.spec_tokens or found.num_tokens
        given = replace(given, model=model.model, revision=model.revision, num_speculative_tokens=count)
        if given.method is None and asked.spec_method is None:
            given = replace(given, method=found.method)
        asked = replace(asked, speculative_config=given, spec_tokens=None)
        logger.info("%s proposes for %s", model.model, found.verifier)
        model = replace(model, model=found.verifier, revision=None)
        return replace(settings, model=model, speculation=asked), _located(model)
    wanted = asked.speculative_config.method or asked.spec_method
    name = asked.spec_model or asked.speculative_config.model
    if wanted is None and name is not None:
        try:
            folder = _located(replace(model, model=name, revision=asked.speculative_config.revision))
        except ModelError as error:
            raise ModelError(f"speculative_config: model={name!r}: {error}") from error
        method = row_heads_method(folder) or head_method(folder)
        if method is not None:
            settings = replace(settings, speculation=replace(asked, spec_method=method))
    return settings, path


def _located(model: ModelSettings) -> Path:
    return locate(
        model.model,
        revision=model.revision,
        download_dir=model.download_dir,
        weights=model.load_format != DUMMY,
        ignore_patterns=model.ignore_patterns,
    )


def _draft_facts(settings: EngineSettings, facts: ModelFacts) -> ModelFacts | None:
    """What the files of the model say that is to propose drafts. Raises ConfigError for one whose tokens are others,
    ModelError for one that cannot be read, both by what it was called."""
    model = settings.model
    wanted = merged(settings.speculation)
    source = draft_source(settings.speculation)
    if wanted.method == MTP:
        return describe_head(facts.name, Path(facts.path), facts, MTP, model.load_format)
    if source is None:
        return None
    if settings.speculation.speculative_config.quantization is not None:
        check_quantization(settings.speculation.speculative_config.quantization)
    dummy = model.load_format == DUMMY
    try:
        path = locate(
            source.name,
            revision=source.revision,
            download_dir=model.download_dir,
            weights=not dummy,
            ignore_patterns=model.ignore_patterns,
        )
        if wanted.method in (DFLASH, EAGLE, EAGLE3, PEAGLE):
            return describe_head(source.name, path, facts, wanted.method, model.load_format)
        if wanted.method in ROW_HEADS:
            return describe_row_heads(source.name, path, facts, wanted.method, model.load_format)
        draft = describe(source.name, path, load_format=DUMMY if dummy else "auto")
    except ModelError as error:
        raise ModelError(f"speculative_config: model={source.name!r}: {error}") from error
    if not model.skip_tokenizer_init and draft.vocab_size == facts.vocab_size:
        check_same_tokens(Path(draft.path), Path(facts.path), draft.name, facts.name)
    return draft


def build_inproc(args: EngineArgs, make_client: Callable[[CoreApi], InprocClient] = InprocClient) -> LaunchedEngine:
    """An engine in this process, whose steps run on the caller's event loop. `make_client`: how it is reached."""
    with gc_paused():
        return start_inproc(build_config(args), make_client)


def start_inproc(config: EngineConfig, make_client: Callable[[CoreApi], InprocClient] = InprocClient) -> LaunchedEngine:
    """`build_inproc` from a complete configuration. The tokenizer loads on a thread while the weights do."""
    timer = PhaseTimer()
    with contextlib.ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(1, "tokenizer"))
        tokenizer_soon = pool.submit(tokenizer_of, config.model, config.facts)
        with timer.phase("engine"):
            if config.parallel.distributed_executor_backend == UNI:
                load_torch_library()  # the tokenizer is made meanwhile
            core = EngineCore(config, make_executor(config, WORKER))
        opened.callback(core.shutdown)
        with timer.phase("tokenizer"):
            tokenizer = tokenizer_soon.result()
        client = make_client(core)
        opened.callback(client.stop)
        llm = AsyncLLM(
            client,
            tokenizer,
            config.facts,
            config.scheduler,
            cache=config.cache,
            log_interval_s=envs.log_stats_interval_s(),
            log_stats=not config.observability.disable_log_stats,
            seeds=RequestSeeds(config.model.seed),
            pooler=config.model.pooler_config if config.model.pools else None,
        )
        log_ready(config, core.ready, timer)
        opened.pop_all()
        pool.shutdown()
    return LaunchedEngine(llm, config, tokenizer)


def log_ready(config: EngineConfig, ready: EngineReady, timer: PhaseTimer) -> None:
    """Log that an engine takes requests, with the size of its cache, what the start took, and what would end a part of
    that which is needless."""
    logger.info(
        "%s, %s, %d tokens of KV cache, ready: %s",
        config.facts.name,
        config.model.dtype,
        ready.num_blocks * ready.block_size,
        timer.summary(),
    )
    folder = source_only()
    if folder is not None:
        logger.info(
            "2 to 3 s of this start went into compiling torch's Python, of which no bytecode is kept: "
            "`python -m compileall -q -j 0 %s`, once, ends that",
            folder,
        )
