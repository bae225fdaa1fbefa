"""Rules of threads: how many each worker of this machine computes with, and on which CPUs."""

from pagemill.catalog.executors import RAY, UNI
from pagemill.config.decisions import Decisions, completed
from pagemill.config.facts import DeviceFacts
from pagemill.config.fleet_plan import FleetPlan
from pagemill.config.rules.thread_plan import ThreadPlan, ThreadRequest, plan_threads
from pagemill.config.sections import CpuConfig, CpuSettings, ParallelConfig
from pagemill.config.thread_lists import AUTO, join_lists, parse_lists
from pagemill.errors import ConfigError


def resolve_cpu(
    asked: CpuSettings, parallel: ParallelConfig, device: DeviceFacts, fleet: FleetPlan, decisions: Decisions
) -> CpuConfig:
    """The section, complete: this machine's workers share its cores. Raises ConfigError for CPUs that workers cannot
    have."""
    bind = asked.cpu_threads_bind or device.threads_bind or AUTO
    plan = _plan(bind, asked.cpu_threads, parallel, device, fleet)
    if asked.cpu_threads is None:
        decisions.note("cpu_threads", plan.threads, plan.why)
    cpus = join_lists(plan.cpus)
    if asked.cpu_threads_bind in (None, AUTO):
        decisions.note("cpu_threads_bind", cpus, plan.why)
    return completed(CpuConfig, asked, cpu_threads=plan.threads, cpu_threads_bind=cpus)


def _plan(
    bind: str, threads: int | None, parallel: ParallelConfig, device: DeviceFacts, fleet: FleetPlan
) -> ThreadPlan:
    """Where workers run is not known on a cluster, nor is there a choice without workers."""
    lists = parse_lists(bind)
    workers = parallel.workers_per_replica
    if parallel.distributed_executor_backend == RAY or not fleet.local:
        if lists:
            raise ConfigError(
                f"cpu_threads_bind={bind!r} is for workers on this machine, and Ray, or other machines, have them; "
                "leave it out"
            )
        return _unbound(threads, workers, device, "workers run on other machines")
    workers *= len(fleet.local)
    if device.topology is None:
        if lists:
            raise ConfigError(
                f"cpu_threads_bind={bind!r} binds what computes on a CPU, and the device is {device.kind}; leave it "
                "out, or use --device cpu"
            )
        return _unbound(threads, workers, device, f"a {device.kind} computes")
    # An engine in its caller's process has its worker there too, unless workers have processes of their own.
    own_process = not (fleet.in_process and parallel.distributed_executor_backend == UNI)
    front_end = own_process and not fleet.headless
    return plan_threads(device.topology, ThreadRequest(bind, threads, workers, front_end, own_process))


def _unbound(threads: int | None, num_workers: int, device: DeviceFacts, why: str) -> ThreadPlan:
    return ThreadPlan(threads or max(1, device.num_cores // num_workers), (), why)
