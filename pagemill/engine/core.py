"""`EngineCore`: the loop of schedule, execute, sample and update, around one scheduler and one executor.

Knows nothing about sockets, text, or how many devices there are.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pagemill import envs
from pagemill.catalog.logits import processor_paths
from pagemill.config.choices import LogprobsMode
from pagemill.config.engine_config import EngineConfig
from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.config.structured_outputs import StructuredOutputsConfig
from pagemill.engine.executor.interface import Executor
from pagemill.engine.kv_cache.events import EventSink, NoSink
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.kv_cache.planning import WorkerMemory, merge_specs, plan_kv_cache
from pagemill.engine.kv_cache.residency import ResidencySampler
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.scheduler import GrammarOf, Scheduler, no_grammar
from pagemill.engine.structured_output.compiling import GrammarQueue
from pagemill.errors import EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.engine_io import EngineCoreOutputs, EngineCoreRequest, EngineReady
from pagemill.messages.kv_spec import KVCacheConfig, MambaSpec
from pagemill.messages.pending import Pending
from pagemill.messages.stats import SchedulerStats
from pagemill.messages.step import ModelRunnerOutput
from pagemill.messages.structured_outputs import FormRules
from pagemill.messages.worker_api import CALLED_BY_NAME
from pagemill.tokenizers.load import tokenizer_of

logger = get_logger(__name__)


class EngineCore:
    """Implements `CoreApi` (messages/core_api.py). Not thread-safe.

    As many steps are in flight at once as the executor has use for, or `depth` of them. With one, each step's tokens
    are awaited before the next is scheduled; with more, steps are scheduled ahead of tokens that are still being
    sampled (asynchronous scheduling). The tokens are the same.
    Construction brings the engine up, and raises ConfigError when its settings cannot work. The executor is the core's
    from then on: it is shut down with the core, and when there will be none.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        depth: int | None = None,
        data_parallel_rank: int = 0,
        grammar_of: GrammarOf = no_grammar,
    ) -> None:
        """`grammar_of`: what restricts the output of a request, if anything does."""
        self._executor = executor
        self._sink: EventSink = NoSink()
        self._grammars = GrammarQueue(
            lambda: tokenizer_of(config.model, config.facts),
            config.facts.vocab_size,
            config.facts.eos_token_ids,
            config.model.structured_outputs_config.backend,
        )
        try:
            self._bring_up(config, depth or executor.max_concurrent_steps, grammar_of)
            self._sink = _event_sink(config.cache.kv_events_config, data_parallel_rank)
        except BaseException:
            self.shutdown()
            raise

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that cannot run is reported by the next step. Raises EngineDeadError, and ValueError for
        an id that is in use, also by a request whose grammar is being made."""
        self._check_alive()
        if (
            request.request_id in (self._held or ())
            or request.request_id in self._grammars
            or request.request_id in self._scheduler.request_ids
        ):
            raise ValueError(f"request_id={request.request_id!r} is in use")
        if self._held is not None:
            self._held[request.request_id] = request
        elif request.grammar is None:
            self._scheduler.add(request)
        else:
            self._grammars.add(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests, in whatever state; unknown ids are ignored. No output follows for them."""
        held = self._held or {}
        for request_id in request_ids if held else ():
            held.pop(request_id, None)
        self._grammars.abort(request_ids)
        self._scheduler.abort(request_ids)
        self._publish_events()

    def stats(self) -> SchedulerStats:
        """What runs and waits now, and how full the cache is."""
        stats = self._scheduler.stats()
        waiting = len(self._grammars) + len(self._held or ())
        return msgspec.structs.replace(stats, num_waiting=stats.num_waiting + waiting) if waiting else stats

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self._paused:
            return len(self._in_flight) > 0
        return self._scheduler.has_work() or len(self._grammars) > 0

    def step(self) -> list[EngineCoreOutputs]:
        """Keep up to `depth` steps in flight; what the oldest one produced. Raises EngineDeadError, from then on
        always, when anything fails that does not belong to one request."""
        self._check_alive()
        try:
            return self._step()
        except Exception as error:
            raise self._die(error) from error

    def only_waits(self) -> bool:
        """Whether there are requests, and a step would do nothing for any of them: their grammars are being made."""
        return len(self._grammars) > 0 and not (self._paused or self._in_flight or self._scheduler.has_work())

    def execute_dummy_step(self) -> None:
        """Run a step of no request on all workers, while there is no work here, or none that can begin: other replicas
        wait for this one's part. Raises EngineDeadError."""
        self._check_alive()
        try:
            self._take_ready(idle=False)
            self._executor.call_all("execute_dummy_step")
        except Exception as error:
            raise self._die(error) from error
        self.num_executed += 1

    def prepare_more(self) -> bool:
        """Let the workers do a piece of what later requests would wait for; False when nothing is left. Only while
        there is no work. Raises EngineDeadError."""
        self._check_alive()
        try:
            return any(self._executor.call_all("prepare_more"))
        except Exception as error:
            raise self._die(error) from error

    def call(self, name: str, *args: Any) -> Any:
        """A rare call by name: reset_prefix_cache, which returns whether the cache was emptied (it is not while a
        request runs); pause, after which requests stay as they are, also new ones, until resume; hold, after which
        only new ones wait until then; is_paused; is_done, whether there is nothing but requests that are held;
        collective_rpc, which calls a method of all workers. Raises ValueError for another name."""
        if name not in self._calls:
            raise ValueError(f"unknown call {name!r}; known: {', '.join(self._calls)}")
        result = self._calls[name](*args)
        self._publish_events()
        return result

    def check_integrity(self) -> None:
        """Raise when the engine's bookkeeping contradicts itself. Costs O(blocks): for tests and idle time."""
        self._scheduler.check_integrity()

    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone or gives no sign of life. From any thread."""
        self._executor.check_health()

    def shutdown(self) -> None:
        """Stop the workers, and the publisher of events. May be called twice."""
        self._grammars.shutdown()
        try:
            self._executor.shutdown()
        finally:
            self._sink.shutdown()

    def _bring_up(self, config: EngineConfig, depth: int, grammar_of: GrammarOf) -> None:
        executor = self._executor
        self._depth = depth
        self._in_flight: deque[Pending[ModelRunnerOutput]] = deque()
        self._death: str | None = None
        self._paused = False
        """Whether no further step is begun; those in flight are completed."""
        self._held: dict[str, EngineCoreRequest] | None = None
        """New requests, while they are to wait; None: they are not."""
        self.num_executed = 0
        """Steps given to the workers so far, with and without requests."""
        limits = scheduler_limits(config)
        plan = _plan(config, limits, executor)
        executor.initialize_kv_cache(plan)
        executor.call_all("warm_up")
        cache = config.cache
        algorithm = cache.prefix_caching_hash_algo if cache.enable_prefix_caching else None
        self._kv = KVCacheManager(
            plan,
            algorithm,
            envs.prefix_hash_seed(),
            partial_reuse=cache.enable_partial_block_reuse,
            record_events=cache.kv_events_config.active,
            residency=ResidencySampler(cache.kv_cache_metrics_sample) if cache.kv_cache_metrics else None,
        )
        self._scheduler = Scheduler(
            limits_of_cache(limits, plan, depth),
            self._kv,
            depth=depth,
            grammar_of=lambda request: self._grammars.grammar_of(request) if request.grammar else grammar_of(request),
        )
        self._calls: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self._kv.reset,
            "pause": self._pause,
            "hold": self._hold,
            "resume": self._resume,
            "is_done": lambda: not (self._in_flight or self._scheduler.has_work() or len(self._grammars)),
            "is_paused": lambda: self._paused,
            "collective_rpc": self._call_workers,
        }
        self.ready = EngineReady(
            max_model_len=limits.max_model_len,
            vocab_size=config.facts.vocab_size,
            num_blocks=plan.num_blocks,
            block_size=plan.groups[0].spec.block_size,
            logits_processors=processor_paths(config.model.logits_processors),
            gives_raw_logprobs=config.model.logprobs_mode == LogprobsMode.RAW_LOGPROBS,
            forms=_form_rules(config.model.structured_outputs_config),
            max_logprobs=config.model.max_logprobs,
        )

    def _pause(self) -> bool:
        self._paused = True
        return True

    def _hold(self) -> bool:
        self._held = self._held or {}
        return True

    def _resume(self) -> bool:
        self._paused = False
        held, self._held = self._held, None
        for request in (held or {}).values():
            self.add(request)
        return True

    def _step(self) -> list[EngineCoreOutputs]:
        self._take_ready(idle=not self._scheduler.has_work())
        has_room = len(self._in_flight) < self._depth and not self._paused
        step = self._scheduler.schedule() if has_room else None
        outputs = []
        if step is not None:
            self._executor.execute_model(step)
            sampling = self._scheduler.sampling
            while sampling.awaits_tokens():  # masks of grammars: the step is computed meanwhile
                outputs.append(self._scheduler.update(self._in_flight.popleft().result()))
            self._in_flight.append(self._executor.sample_tokens(sampling.take()))
            self.num_executed += 1
        if self._in_flight and (step is None or len(self._in_flight) == self._depth):
            outputs.append(self._scheduler.update(self._in_flight.popleft().result()))
        unreported = self._scheduler.take_unreported()
        if unreported:
            outputs.append(EngineCoreOutputs(outputs=unreported, stats=self._scheduler.stats()))
        self._publish_events()
        return outputs

    def _take_ready(self, *, idle: bool) -> None:
        """Queue requests whose grammar is there; `idle`: wait a little for one."""
        if len(self._grammars) and not self._paused:
            for request in self._grammars.take_ready(idle):
                self._scheduler.add(request)

    def _publish_events(self) -> None:
        """After whatever may change what is cached: an idle engine takes no step that would do it later."""
        events = self._kv.take_events()
        if events:
            self._sink.publish(events)

    def _die(self, cause: Exception) -> EngineDeadError:
        self._death = f"{type(cause).__name__}: {cause}"
        return EngineDeadError(f"the engine stopped: {self._death}")

    def _call_workers(self, method: str, *args: Any) -> str:
        """Results of a method of all workers by rank, as JSON. Raises ValueError for one that is not in
        `CALLED_BY_NAME`, and what the method raises."""
        if method not in CALLED_BY_NAME:
            raise ValueError(f"method={method!r} is not one of {', '.join(CALLED_BY_NAME)}")
        return msgspec.json.encode(self._executor.call_all(method, *args)).decode()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine stopped: {self._death}")


def scheduler_limits(config: EngineConfig) -> SchedulerLimits:
    """What a scheduler may put into one step, and in which order, taken from an engine's configuration."""
    num_drafts = config.speculation.speculative_config.num_speculative_tokens or 0
    return SchedulerLimits(
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
        max_prefill_tokens=config.scheduler.max_prefill_tokens,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
        policy=config.scheduler.scheduling_policy,
        jump_forward=config.scheduler.enable_jump_forward,
        scores_forced=config.model.logprobs_mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS),
        # A processor of somebody's own may rule out the one token that a mask leaves.
        holds_forced=not processor_paths(config.model.logits_processors),
        num_drafts=num_drafts,
        lookahead=0 if config.draft is None else 1 + num_drafts,
    )


def limits_of_cache(limits: SchedulerLimits, plan: KVCacheConfig, depth: int) -> SchedulerLimits:
    """The limits with up to `depth` steps in flight. What comes before forced tokens may then be computed already, and
    is computed once more for their log-probabilities, which no layer does that keeps a state."""
    keeps_states = any(isinstance(group.spec, MambaSpec) for group in plan.groups)
    return replace(limits, scores_forced=False) if depth > 1 and keeps_states else limits


def _form_rules(config: StructuredOutputsConfig) -> FormRules:
    return FormRules(config.backend, config.disable_any_whitespace, config.disable_additional_properties)


def _event_sink(config: KVEventsConfig, data_parallel_rank: int) -> EventSink:
    if not config.active:
        return NoSink()
    # Deferred: zmq, which an engine without sockets does not need.
    from pagemill.transport.kv_event_publisher import KVEventPublisher

    return KVEventPublisher(config, data_parallel_rank)


def _plan(config: EngineConfig, limits: SchedulerLimits, executor: Executor) -> KVCacheConfig:
    specs = executor.kv_cache_specs()
    plan = plan_kv_cache(
        merge_specs(specs),
        [WorkerMemory(held, room) for held, room in zip(specs, executor.available_kv_bytes(), strict=True)],
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_step_tokens,
        num_blocks_override=config.cache.num_gpu_blocks_override,
        prefix_caching=config.cache.enable_prefix_caching,
        hybrid=not config.cache.disable_hybrid_kv_cache_manager,
    )
    shapes = ", ".join(f"{len(group.layers)} x {type(group.spec).__name__}" for group in plan.groups)
    logger.debug("KV cache: %d blocks, groups: %s", plan.num_blocks, shapes)
    return plan
