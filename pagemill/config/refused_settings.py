"""Settings of vLLM that have no counterpart here: what to do instead, by the name of the keyword.

A flag or keyword of these is an error that says so, instead of one that is merely unknown; a keyword that has the value
that it has in vLLM by default asks for nothing. Add a setting to its section and take it out here when its effect
exists.
"""

from collections.abc import Mapping
from typing import Any, Final

from pagemill.catalog.vllm_flags import DEFAULTS, SHORT_FLAGS
from pagemill.errors import ConfigError

_ELSEWHERE: Final[tuple[tuple[str, str], ...]] = (
    ("send return_tokens_as_token_ids with each request", "return_tokens_as_token_ids"),
    ("use --cpu-threads-bind", "numa_bind numa_bind_nodes numa_bind_cpus"),
    ("set CUDA_VISIBLE_DEVICES", "device_ids"),
    ("links and engines have time-outs of their own: --engine-hang-timeout, --data-parallel-node-timeout",
     "distributed_timeout_seconds cpu_distributed_timeout_seconds enable_fault_tolerance fault_tolerance_config"),
    ("use `pagemill bench --profile`", "profiler_config enable_layerwise_nvtx_tracing ray_workers_use_nsight"),
    ("use --hf-overrides", "hf_config_path"),
    ("set HF_TOKEN in the environment", "hf_token"),
    ("send chat_template_kwargs with each request", "default_chat_template_kwargs"),
    ("set PAGEMILL_LOGGING_LEVEL", "logging_config log_level log_config_file"),
    ("clients ask for it with stream_options.include_usage", "enable_force_include_usage"),
    ("use --distributed-executor-backend ray", "worker_use_ray engine_use_ray"),
    ("use --runner", "task"),
    ("use --hf-overrides", "rope_scaling rope_theta"),
    ("use --cudagraph-capture-sizes and --max-cudagraph-capture-size", "cuda_graph_sizes max_seq_len_to_capture"),
    ("--reasoning-parser alone is enough", "enable_reasoning"),
    ("use --structured-outputs-config.backend", "guided_decoding_backend"),
)  # fmt: skip
"""What is here under another name, or in another place."""

_GROUPS: Final[tuple[tuple[str, str], ...]] = (
    ("code of a repository is never run, and architectures are native (see `pagemill info`); leave it out",
     "trust_remote_code"),
    ("adapters are not loaded yet; serve a checkpoint into which the adapter is merged",
     "enable_lora max_loras max_lora_rank lora_dtype enable_tower_connector_lora max_cpu_loras fully_sharded_loras "
     "lora_target_modules default_mm_loras specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras "
     "max_lora_cls_labels lora_modules"),
    ("acceptance is counted for the whole engine so far (docs/speculation.md); leave it out",
     "per_request_spec_decode_metrics"),
    ("tools are called by clients only; leave it out", "tool_server"),
    ("how much is thought cannot be limited yet; leave it out", "reasoning_config anthropic_disabled_thinking_effort"),
    ("there is no parser for that model yet; leave it out", "cohere_is_reasoning_model cohere_format"),
    ("nothing is handed over between servers yet; leave it out",
     "kv_transfer_config ec_transfer_config ec_manager_config engram_config weight_transfer_config aux_output_config"),
    ("nothing is kept outside of the device's memory; use --kv-cache-memory-bytes, --quantization, or more workers",
     "kv_offloading_size kv_offloading_backend cpu_offload_gb cpu_offload_params offload_backend offload_group_size "
     "offload_num_in_group offload_prefetch_step offload_params"),
    ("weights and cache stay where they are; leave it out",
     "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator "
     "enable_nccl_comm_suspend"),
    ("models here take text only; leave it out",
     "enable_mm_embeds mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only "
     "mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
     "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method "
     "mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize disable_chunked_mm_input "
     "trust_request_mm_kwargs enable_prompt_embeds interleave_mm_strings"),
    ("a checkpoint says how it is quantized; use --quantization", "quantization_config"),
    ("it is chosen by the device; leave it out",
     "moe_backend linear_backend ir_op_priority sparse_indexer_topk_backend kernel_config gdn_prefill_backend "
     "kda_prefill_backend kda_decode_backend use_fp64_gumbel performance_mode"),
    ("how the states of a model are kept follows from the model; leave it out",
     "mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
     "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint "
     "replayssm_buffer_len use_replayssm"),
    ("the cache does not work that way; leave it out",
     "prefix_cache_retention_interval kv_cache_dtype_skip_layers kv_sharing_fast_prefill swa_bounded_replay "
     "prefix_match_unit disable_sliding_window"),
    ("use --max-num-batched-tokens, --max-num-seqs, --max-prefill-tokens and --long-prefill-token-threshold",
     "max_num_scheduled_tokens max_num_active_seqs long_prefill_token_threshold_adaptive scheduler_reserve_full_isl "
     "watermark prefill_schedule_interval"),
    ("there is one scheduler; leave it out", "scheduler_cls"),
    ("every token is sent when it is there; leave it out", "stream_interval"),
    ("several machines are nodes of one head (--headless), or a Ray cluster (--distributed-executor-backend ray)",
     "master_addr master_port nnodes node_rank data_parallel_rank data_parallel_backend data_parallel_hybrid_lb "
     "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_supervisor_port "
     "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold"),
    ("there are tensor, pipeline, data and expert parallelism only; leave it out",
     "decode_context_parallel_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
     "cp_kv_cache_interleave_size prefill_context_parallel_size enable_hc_sp enable_batch_sharded_sampling "
     "enable_ep_weight_filter all2all_backend enable_dbo ubatch_size dbo_decode_token_threshold "
     "dbo_prefill_token_threshold enable_elastic_ep elastic_ep_max_dp_size enable_eplb eplb_config "
     "expert_placement_strategy dp_sync_interval disable_nccl_for_dp_synchronization enable_shm_tensor_arena"),
    ("install a plug-in (docs/plug-ins.md)",
     "worker_cls worker_extension_cls io_processor_plugin model_class_overrides"),
    ("start with --chat-template", "trust_request_chat_template"),
    ("texts are given in the form that the template takes; leave it out", "chat_template_content_format"),
    ("answers are those of an assistant; leave it out", "response_role"),
    ("all methods and headers are allowed for --allowed-origins, without credentials",
     "allow_credentials allowed_methods allowed_headers"),
    ("see docs/metrics.md for what is counted; leave it out",
     "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces custom_histogram_buckets "
     "enable_mfu_metrics enable_logging_iteration_details aggregate_engine_logging jit_monitor_mode "
     "jit_monitor_verbose enable_per_request_metrics"),
    ("there is no such endpoint; leave it out",
     "enable_tokenizer_info_endpoint tokens_only enable_scale_out enable_flash_late_interaction "
     "grpc grpc_port"),
    ("it is not implemented; leave it out",
     "enable_return_routed_experts return_sampling_mask enable_trace_replay watermark_config diffusion_config "
     "additional_config fingerprint_mode fingerprint_value fail_on_environ_validation renderer_num_workers"),
    ("it was a setting of earlier releases of vLLM, and does nothing there either; leave it out",
     "swap_space use_v2_block_manager num_scheduler_steps multi_step_stream_outputs num_lookahead_slots "
     "preemption_mode disable_async_output_proc disable_frontend_multiprocessing "
     "max_num_partial_prefills max_long_partial_prefills scheduler_delay_factor"),
)  # fmt: skip

ELSEWHERE: Final[dict[str, str]] = {name: instead for instead, names in _ELSEWHERE for name in names.split()}
"""Name of the keyword -> where it is."""

REFUSED_SETTINGS: Final[dict[str, str]] = ELSEWHERE | {
    name: instead for instead, names in _GROUPS for name in names.split()
}
"""Name of the keyword -> what to do instead; those of `ELSEWHERE` too."""

_OF_SERVERS: Final[dict[str, str]] = {"enable_log_requests": "it is a flag of `pagemill serve`, which logs them"}
"""The same of keywords of engines there that are settings of the server here."""


def check_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of keywords without those that ask for nothing. Raises ConfigError for one that is refused."""
    refused = REFUSED_SETTINGS | _OF_SERVERS
    for name in sorted(refused.keys() & given):
        if not asks_for_nothing(name, given[name]):
            raise ConfigError(f"{name} is not supported: {refused[name]}")
    return {name: value for name, value in given.items() if name not in refused}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a setting has the value that it has in vLLM where nobody gives it."""
    default = DEFAULTS.get(name)
    return value is None or (type(value) is type(default) and value == default)


def refusal_of(flag: str) -> str | None:
    """What to say of a flag as it was typed (`--enable-lora`, `--ssl-keyfile=x`, `--no-...`, `-sc`); None for one that
    nobody knows."""
    typed = flag.partition("=")[0]
    long = f"--{SHORT_FLAGS[short]}" if (short := typed.partition(".")[0]) in SHORT_FLAGS else typed
    if not long.startswith("--"):
        return None
    name = long.partition(".")[0].removeprefix("--").replace("-", "_")
    instead = REFUSED_SETTINGS.get(name) or REFUSED_SETTINGS.get(name.removeprefix("no_"))
    return None if instead is None else f"{typed} is not supported: {instead}"
