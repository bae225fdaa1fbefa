"""Names on the wire, series that exist from the start, and figures that add up."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagemill.messages.stats import ResidencySamples, SchedulerStats
from pagemill.observability.serving_metrics import FINISH_REASONS, FinishedRequest, ServingMetrics, one_two_five

MUST = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("num_preemptions_total", "cache_config_info", "admission_rejections_total", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_count", "time_to_first_token_seconds_sum", "inter_token_latency_seconds_bucket"),
    *("e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_count"),
    *("request_decode_time_seconds_count", "request_inference_time_seconds_count", "request_params_n_count"),
    *("request_max_num_generation_tokens_count", "request_params_max_tokens_count", "iteration_tokens_total_count"),
    *("kv_block_lifetime_seconds_count", "kv_block_idle_before_evict_seconds_count"),
    "kv_block_reuse_gap_seconds_count",
}
NEVER = {
    *("tokens_total", "time_in_queue_requests", "avg_prompt_throughput_toks_per_s", "num_requests_swapped"),
    *("cpu_cache_usage_perc", "model_forward_time_milliseconds"),
}


@pytest.fixture
def metrics():
    return ServingMetrics("a-model", 2000, {"block_size": 16, "enable_prefix_caching": True})


def samples(metrics):
    """(name, labels) -> value, of the page as a scraper reads it."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def finished(**changes):
    values = {
        "reason": "stop",
        "num_prompt_tokens": 30,
        "num_generated_tokens": 5,
        "num_cached_tokens": 16,
        "max_tokens": 100,
        "num_completions": 1,
        "arrived": 10.0,
        "scheduled": 10.5,
        "first_token": 11.0,
        "last_token": 12.0,
        "ended": 12.5,
    }
    return FinishedRequest(**(values | changes))


def test_every_name_is_there_from_the_start_and_none_that_was_abolished(metrics):
    names = {name for name, _ in samples(metrics)}
    assert {f"vllm:{name}" for name in MUST} <= names
    assert not {f"vllm:{name}" for name in NEVER} & names


def test_labels_and_every_finish_reason(metrics):
    found = samples(metrics)
    for reason in FINISH_REASONS:
        key = ("vllm:request_success_total", (("engine", "0"), ("finished_reason", reason), ("model_name", "a-model")))
        assert found[key] == 0
    (info,) = (dict(labels) for name, labels in found if name == "vllm:cache_config_info")
    assert info == {"engine": "0", "block_size": "16", "enable_prefix_caching": "True"}


def test_steps_of_several_engines(metrics):
    metrics.step(0, SchedulerStats(num_running=3, num_waiting=2, kv_cache_usage=0.5, prefix_cache_hits=7), 3)
    metrics.step(1, SchedulerStats(num_running=1, num_preemptions=4), 900)
    found = samples(metrics)
    running = {dict(labels)["engine"]: v for (name, labels), v in found.items() if name == "vllm:num_requests_running"}
    assert running == {"0": 3, "1": 1}
    values = metrics.values()
    assert values["vllm:iteration_tokens_total_count"] == 2
    assert values["vllm:iteration_tokens_total_sum"] == 903


def test_a_finished_request(metrics):
    metrics.finished(finished())
    metrics.finished(
        finished(reason="abort", scheduled=None, first_token=None, last_token=None, num_generated_tokens=0)
    )
    values = metrics.values()
    assert values["vllm:request_success_total{finished_reason=stop}"] == 1
    assert values["vllm:request_success_total{finished_reason=abort}"] == 1
    assert values["vllm:e2e_request_latency_seconds_sum"] == 5.0
    assert values["vllm:request_queue_time_seconds_sum"] == 0.5
    assert values["vllm:request_prefill_time_seconds_sum"] == 0.5
    assert values["vllm:request_decode_time_seconds_sum"] == 1.0
    assert values["vllm:request_inference_time_seconds_sum"] == 1.5
    assert values["vllm:request_time_per_output_token_seconds_sum"] == 0.25
    assert values["vllm:request_prefill_kv_computed_tokens_sum"] == 28
    assert values["vllm:request_queue_time_seconds_count"] == 1, "the aborted one never ran"
    assert values["vllm:request_prompt_tokens_bucket{le=50.0}"] == 2


def test_residency_samples(metrics):
    metrics.step(0, SchedulerStats(residency=ResidencySamples([1.0, 3.0], [0.5, 0.5], [0.25])), 1)
    values = metrics.values()
    assert values["vllm:kv_block_lifetime_seconds_sum"] == 4.0
    assert values["vllm:kv_block_idle_before_evict_seconds_count"] == 2
    assert values["vllm:kv_block_reuse_gap_seconds_sum"] == 0.25


def test_rejections(metrics):
    metrics.rejected()
    assert metrics.values()["vllm:admission_rejections_total{reason=queue_full}"] == 1


def test_buckets_of_tokens():
    assert one_two_five(2000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert one_two_five(1) == (1,)
