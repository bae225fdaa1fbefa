"""`EngineConfig`: every section, resolved. Seen by composition roots only; everything else gets its section."""

from dataclasses import dataclass, field, replace

from pagemill.config.draft import DraftModel
from pagemill.config.facts import ModelFacts
from pagemill.config.graph_config import GraphConfig
from pagemill.config.sections import (
    CacheConfig,
    CpuConfig,
    EngineSettings,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pagemill.config.speculation import NO_SPECULATION, SpeculationConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """The result of `resolve`, for all engines of this machine."""

    model: ModelConfig = field()
    cache: CacheConfig = field()
    scheduler: SchedulerConfig = field()
    parallel: ParallelConfig = field()
    graphs: GraphConfig = field()
    cpu: CpuConfig = field()
    speculation: SpeculationConfig = field(default=NO_SPECULATION)
    draft: DraftModel | None = field(default=None)
    """The model that proposes drafts, where one does."""
    facts: ModelFacts

    def of_engine(self, number: int) -> "EngineConfig":
        """What the `number`-th engine of this machine is told: its workers' CPUs alone."""
        return replace(self, cpu=self.cpu.of_engine(number, self.parallel.workers_per_replica))
