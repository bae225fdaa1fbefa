"""Rules of compilation and CUDA graphs, on top of what the optimization level means (config/compilation.py)."""

from pagemill.config.compilation import GraphLimits, complete
from pagemill.config.decisions import Decisions, completed
from pagemill.config.facts import DeviceFacts
from pagemill.config.fleet_plan import FleetPlan
from pagemill.config.graph_config import GraphConfig, GraphSettings
from pagemill.config.graph_mode import GraphMode
from pagemill.config.sections import SchedulerConfig
from pagemill.errors import ConfigError


def resolve_graphs(
    asked: GraphSettings, scheduler: SchedulerConfig, device: DeviceFacts, fleet: FleetPlan, decisions: Decisions
) -> GraphConfig:
    """The section, complete. Raises ConfigError."""
    limits = GraphLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, device.kind, device.captures)
    compilation = complete(asked, limits)
    if fleet.shares_experts and compilation.cudagraph_mode is not GraphMode.NONE:
        raise ConfigError(
            "enable_expert_parallel=True with several engines needs --enforce-eager: how many tokens the others have "
            "is known in the step only, and a captured graph cannot ask"
        )
    if not device.captures:
        why = f"there are no graphs on a {device.kind}"
    else:
        why = "enforce_eager" if asked.enforce_eager else f"optimization level {asked.optimization_level}"
    decisions.note("compilation_config", compilation, why)
    return completed(GraphConfig, asked, compilation_config=compilation)
