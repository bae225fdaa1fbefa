"""`EngineConfig`: every section, resolved. Seen by composition roots only; everything else gets its section."""

from dataclasses import dataclass, field

from pagemill.config.facts import ModelFacts
from pagemill.config.sections import (
    CacheConfig,
    CpuConfig,
    DeviceConfig,
    GraphConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)


@dataclass(frozen=True)
class EngineConfig:
    """The result of `resolve`: no field that a section documents as "default: ..." is None any more."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    cpu: CpuConfig
    facts: ModelFacts
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
