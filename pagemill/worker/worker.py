"""`Worker`: brings up the device, loads the model, measures memory, and implements `messages.worker_api.WorkerApi`."""

from torch import Tensor

from pagemill.catalog.platforms import PLATFORMS
from pagemill.config.engine_config import EngineConfig
from pagemill.errors import PagemillError
from pagemill.log import get_logger
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheSpec
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.model.factory import load_model
from pagemill.model.models.causal_lm import CausalLM
from pagemill.platforms.interface import Platform
from pagemill.utils.timing import PhaseTimer
from pagemill.worker.batch.block_tables import BlockTable, BlockTables
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.kv_tensors.allocate import bind_kv_cache
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.kv_tensors.copy_blocks import copy_blocks
from pagemill.worker.model_runner import ModelRunner
from pagemill.worker.sampling.sampler import Sampler
from pagemill.worker.warm_up import warm_up_step

logger = get_logger(__name__)

DEFAULT_KV_TOKENS = 65_536
MAX_KV_SHARE = 0.4


class Worker:
    """One device of one model replica."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._platform: Platform = PLATFORMS.resolve("cpu")()
        self._loaded: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._num_groups = 0
        self._num_blocks = 0
        self._kv_tensors: list[Tensor] = []

    @property
    def model(self) -> CausalLM:
        """The loaded model."""
        if self._loaded is None:
            raise PagemillError("the worker has no model yet; load_model comes first")
        return self._loaded

    @property
    def runner(self) -> ModelRunner:
        """The model runner."""
        if self._runner is None:
            raise PagemillError("the worker has no KV cache yet; initialize_kv_cache comes first")
        return self._runner

    def load_model(self) -> None:
        """Build the model and load its weights."""
        threads = self._config.cpu.cpu_threads
        if threads is not None:
            self._platform.set_threads(threads)
        timer = PhaseTimer()
        self._loaded = load_model(self._config.facts, self._config.model, self._platform, timer)
        logger.debug("loaded %s: %s", self._config.facts.architecture, timer.summary())

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what it keeps, in layer order."""
        block_size, dtype = self._config.cache.block_size or 16, self._config.model.dtype
        return {name: layer.kv_spec(block_size, dtype) for name, layer in self.model.cache_layers().items()}

    def available_kv_bytes(self) -> int:
        """What was asked for, or room for DEFAULT_KV_TOKENS tokens (at least one request of full length), but no
        more than MAX_KV_SHARE of the free memory."""
        asked = self._config.cache.kv_cache_memory_bytes
        if asked is not None:
            return asked
        specs = self.kv_cache_specs().values()
        length = self._config.model.max_model_len or 0
        num_tokens = max(DEFAULT_KV_TOKENS, length + 2 * max(spec.block_size for spec in specs))
        requests = self._config.scheduler.max_num_seqs
        wanted = sum(spec.page_bytes() * spec.default_blocks(num_tokens, requests) for spec in specs)
        return min(wanted, int(self._platform.facts().free_bytes * MAX_KV_SHARE))

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache, bind it to the layers, and build the runner."""
        device, layers = self._platform.torch_device(), self.model.cache_layers()
        num_slots, length = self._config.scheduler.max_num_seqs, self._config.model.max_model_len or 0
        self._kv_tensors, self._num_blocks = bind_kv_cache(config, layers, device), config.num_blocks
        self._num_groups = len(config.groups)
        states = RequestStates(num_slots, length)
        tables = BlockTables(tuple(BlockTable(num_slots, length, group.spec.block_size) for group in config.groups))
        groups = AttentionGroups(config, layers, tables, device)
        self._runner = ModelRunner(self.model, states, tables, groups, Sampler(states))

    def warm_up(self) -> None:
        """Run one small step on the null block, so that the first request does not pay for lazy initialisation."""
        self.execute_model(warm_up_step(self._num_groups))
        self.sample_tokens()

    def execute_model(self, step: SchedulerOutput) -> None:
        """Copy what the step wants copied, then run its forward pass."""
        copy_blocks(self._kv_tensors, self._num_blocks, step.copies)
        self.runner.execute_model(step)

    def sample_tokens(self) -> ModelRunnerOutput:
        """Sample from the last executed step."""
        return self.runner.sample_tokens()

    def shutdown(self) -> None:
        """Give the model and the cache back."""
        self._runner = None
        self._loaded = None
        self._kv_tensors = []
