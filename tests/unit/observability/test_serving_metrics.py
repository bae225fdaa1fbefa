"""Names on the wire, series that exist from the start, and figures that add up."""

import pytest

from pagemill.messages.stats import ResidencySamples, SchedulerStats
from pagemill.observability.engine_metrics import FINISH_REASONS, EndedCompletion, EngineTimes, one_two_five
from pagemill.observability.serving_metrics import ServingMetrics
from tests.fakes.wire_metrics import wire_samples, wire_values

MUST = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("num_preemptions_total", "cache_config_info", "admission_rejections_total", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_count", "time_to_first_token_seconds_sum", "inter_token_latency_seconds_bucket"),
    *("e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_count"),
    *("request_decode_time_seconds_count", "request_inference_time_seconds_count", "request_params_n_count"),
    *("request_max_num_generation_tokens_count", "request_params_max_tokens_count", "iteration_tokens_total_count"),
    *("num_requests_waiting_by_reason", "request_time_per_output_token_seconds_count"),
}
RESIDENCY = {"kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds"}
NEVER = {
    *("tokens_total", "time_in_queue_requests", "avg_prompt_throughput_toks_per_s", "num_requests_swapped"),
    *("cpu_cache_usage_perc", "model_forward_time_milliseconds", "model_execute_time_milliseconds"),
    *("prompt_tokens", "request_success", "spec_decode_draft_acceptance_rate"),
}
CACHE = {"block_size": 16, "enable_prefix_caching": True}


def make(engines=None, **options):
    figures = {0: SchedulerStats()} if engines is None else engines
    return ServingMetrics("a-model", 2000, CACHE, lambda: figures, **options)


def ended(reason="stop", **changes):
    values = {
        "reason": reason,
        "num_prompt_tokens": 30,
        "num_generated_tokens": 5,
        "num_cached_tokens": 16,
        "max_tokens": 100,
        "e2e_s": 2.5,
        "times": EngineTimes(queued=10.0, scheduled=10.5, first_token=11.0, last_token=12.0),
    }
    return EndedCompletion(**(values | changes))


def names_of(metrics):
    return {name for name, _ in wire_samples(metrics.text())}


def test_every_name_is_there_from_the_start_and_none_that_was_abolished():
    names = names_of(make())
    assert {f"vllm:{name}" for name in MUST} <= names
    assert not {f"vllm:{name}" for name in NEVER} & names
    assert all(name.startswith("vllm:") for name in names)


def test_residency_is_there_when_blocks_are_sampled():
    wanted = {f"vllm:{name}_count" for name in RESIDENCY}
    assert not wanted & names_of(make())
    assert wanted <= names_of(make(with_residency=True))


def test_labels_and_every_finish_reason():
    found = wire_samples(make().text())
    for reason in FINISH_REASONS:
        key = ("vllm:request_success_total", (("engine", "0"), ("finished_reason", reason), ("model_name", "a-model")))
        assert found[key] == 0
    for name, labels in found:
        expected = {"cache_config_info": {"engine"}, "admission_rejections_total": {"model_name"}}
        assert expected.get(name.removeprefix("vllm:"), {"engine", "model_name"}) <= {label for label, _ in labels}
    (info,) = (dict(labels) for name, labels in found if name == "vllm:cache_config_info")
    assert info == {"engine": "0", "block_size": "16", "enable_prefix_caching": "True"}


def test_every_engine_has_its_series():
    engines = {
        1: SchedulerStats(num_running=1, num_preemptions=4),
        0: SchedulerStats(
            num_running=3, num_waiting=2, kv_cache_usage=0.5, prefix_cache_queries=9, prefix_cache_hits=7
        ),
    }
    metrics = make(engines)
    metrics.of_engine(1).num_generation_tokens += 5
    metrics.of_engine(1).ended(ended())
    first, second = (wire_values(metrics.text(), engine) for engine in "01")
    assert (first["vllm:num_requests_running"], second["vllm:num_requests_running"]) == (3, 1)
    assert first["vllm:num_requests_waiting"] == first["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 2
    assert first["vllm:num_requests_waiting_by_reason{reason=deferred}"] == 0
    assert first["vllm:kv_cache_usage_perc"] == 0.5
    assert (first["vllm:prefix_cache_queries_total"], first["vllm:prefix_cache_hits_total"]) == (9, 7)
    assert (first["vllm:num_preemptions_total"], second["vllm:num_preemptions_total"]) == (0, 4)
    assert (first["vllm:generation_tokens_total"], second["vllm:generation_tokens_total"]) == (0, 5)
    assert first["vllm:request_success_total{finished_reason=stop}"] == 0
    assert second["vllm:request_success_total{finished_reason=stop}"] == 1
    assert metrics.total("num_generation_tokens") == 5


def test_completions_that_ended():
    metrics = make()
    engine = metrics.of_engine(0)
    engine.ended(ended())
    engine.ended(ended("abort", times=None, num_generated_tokens=0))
    engine.ended(ended("length", num_generated_tokens=1))
    engine.request_ended(2, 5)
    values = wire_values(metrics.text())
    assert values["vllm:request_success_total{finished_reason=stop}"] == 1
    assert values["vllm:request_success_total{finished_reason=abort}"] == 1
    assert values["vllm:e2e_request_latency_seconds_sum"] == 7.5
    assert values["vllm:request_queue_time_seconds_sum"] == 1.0
    assert values["vllm:request_prefill_time_seconds_sum"] == 1.0
    assert values["vllm:request_decode_time_seconds_sum"] == 2.0
    assert values["vllm:request_inference_time_seconds_sum"] == 3.0
    assert values["vllm:request_time_per_output_token_seconds_sum"] == 0.25, "one token has no time between tokens"
    assert values["vllm:request_prefill_kv_computed_tokens_sum"] == 42
    assert values["vllm:request_queue_time_seconds_count"] == 2, "the aborted one never ran"
    assert values["vllm:request_prompt_tokens_bucket{le=50.0}"] == 3
    assert (values["vllm:request_params_n_sum"], values["vllm:request_params_n_count"]) == (2, 1)
    assert values["vllm:request_max_num_generation_tokens_sum"] == 5


def test_residency_samples():
    metrics = make(with_residency=True)
    metrics.of_engine(0).residency(ResidencySamples([1.0, 3.0], [0.5, 0.5], [0.25]))
    values = wire_values(metrics.text())
    assert values["vllm:kv_block_lifetime_seconds_sum"] == 4.0
    assert values["vllm:kv_block_idle_before_evict_seconds_count"] == 2
    assert values["vllm:kv_block_reuse_gap_seconds_sum"] == 0.25


def test_rejections():
    metrics = make()
    metrics.rejected()
    assert wire_values(metrics.text())["vllm:admission_rejections_total{reason=queue_full}"] == 1


@pytest.mark.parametrize(
    ("highest", "bounds"), [(2000, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)), (1, (1,)), (4999, None)]
)
def test_buckets_of_tokens(highest, bounds):
    assert one_two_five(highest) == (bounds or (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000))
