"""`resolve`: from what was asked, the model, the machine and the fleet to a configuration in which nothing is open.

Each section is completed by the rules of its module in `rules`, from sections that are complete already; rules record
what they decide and why, and never write to what they are given.
"""

import dataclasses

from pagemill.config.decisions import Decision, Decisions
from pagemill.config.engine_config import EngineConfig
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.fields import check_values
from pagemill.config.fleet_plan import IN_PROCESS, FleetPlan
from pagemill.config.rules.cache import resolve_cache
from pagemill.config.rules.cpu import resolve_cpu
from pagemill.config.rules.deterministic import check_deterministic
from pagemill.config.rules.draft import resolve_draft
from pagemill.config.rules.graphs import resolve_graphs
from pagemill.config.rules.model import resolve_model
from pagemill.config.rules.parallel import resolve_parallel
from pagemill.config.rules.scheduler import resolve_scheduler
from pagemill.config.rules.speculation import resolve_speculation
from pagemill.config.sections import DeviceConfig, EngineSettings


def resolve(
    asked: EngineSettings,
    facts: ModelFacts,
    machine: DeviceFacts,
    fleet: FleetPlan = IN_PROCESS,
    draft: ModelFacts | None = None,
) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """The configuration of this machine's engines, and the defaults that were filled in. `fleet`: the engines of the
    server; by default one, in the caller's process. `draft`: the model that is to propose drafts. Raises ConfigError
    that names the settings in conflict and the remedy."""
    for section in dataclasses.fields(asked):
        check_values(getattr(asked, section.name))
    decisions = Decisions()
    device = _device(asked.device, machine, decisions)
    model = resolve_model(asked.model, facts, machine, decisions)
    parallel = resolve_parallel(asked.parallel, facts, decisions)
    cpu = resolve_cpu(asked.cpu, parallel, machine, fleet, decisions)
    scheduler = resolve_scheduler(
        asked.scheduler, model, parallel, cpu, machine, decisions, whole_prompts=facts.is_encoder
    )
    cache = resolve_cache(asked.cache, asked.observability, fleet.size, decisions, keeps=not facts.is_encoder)
    graphs = resolve_graphs(asked.graphs, scheduler, machine, fleet, decisions)
    config = EngineConfig(
        model=model,
        cache=cache,
        scheduler=scheduler,
        parallel=parallel,
        observability=asked.observability,
        device=device,
        graphs=graphs,
        cpu=cpu,
        speculation=resolve_speculation(asked.speculation, model, parallel, machine, facts, decisions, draft),
        draft=resolve_draft(asked.speculation, draft, facts, model, parallel, machine, decisions),
        facts=facts,
    )
    check_deterministic(config, machine)
    return config, tuple(decisions)


def _device(asked: DeviceConfig, machine: DeviceFacts, decisions: Decisions) -> DeviceConfig:
    if asked.device != "auto":
        return asked
    return DeviceConfig(decisions.note("device", machine.kind, "the machine's"))
