# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/engine/arg_utils.py, vllm/entrypoints/openai/cli_args.py @ v0.25.0
"""Names of upstream's flags that vllmx has not built, so that they are told from misspelt ones."""

NOT_BUILT = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_credentials
    allow_deprecated_quantization allowed_headers allowed_local_media_path allowed_media_domains
    allowed_methods allowed_origins api_server_count calculate_kv_scales
    chat_template_content_format code_revision collect_detailed_traces config_format convert
    cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb
    cpu_offload_params cudagraph_metrics data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
    data_parallel_rank data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank
    data_parallel_supervisor_port dbo_decode_token_threshold dbo_prefill_token_threshold
    dcp_comm_backend dcp_kv_cache_interleave_size decode_context_parallel_size
    default_chat_template_kwargs default_mm_loras device_ids diffusion_config
    disable_access_log_for_endpoints disable_cascade_attn disable_custom_all_reduce
    disable_fastapi_docs disable_nccl_for_dp_synchronization distributed_timeout_seconds
    dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s ec_transfer_config enable_auto_tool_choice
    enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb
    enable_expert_parallel enable_flash_late_interaction enable_flashinfer_autotune
    enable_layerwise_nvtx_tracing enable_log_deltas enable_log_outputs
    enable_logging_iteration_details enable_mamba_cache_stochastic_rounding enable_mfu_metrics
    enable_mixed_moe_lora_format enable_mm_embeds enable_offline_docs enable_per_request_metrics
    enable_prompt_embeds enable_prompt_tokens_details enable_request_id_headers
    enable_return_routed_experts enable_server_load_tracking enable_sleep_mode
    enable_ssl_refresh enable_tokenizer_info_endpoint enable_tower_connector_lora eplb_config
    exclude_tools_when_tool_choice_none expert_placement_strategy fail_on_environ_validation
    fingerprint_mode fingerprint_value fully_sharded_loras gdn_prefill_backend grpc
    h11_max_header_count h11_max_incomplete_event_size headless hf_config_path hf_token
    ignore_patterns interleave_mm_strings io_processor_plugin jit_monitor_mode
    jit_monitor_verbose kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample
    kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill language_model_only
    limit_mm_per_prompt linear_backend log_config_file log_error_stack lora_dtype lora_modules
    lora_target_modules mamba_backend mamba_cache_philox_rounds master_addr master_port
    max_cudagraph_capture_size max_log_len max_parallel_loading_workers media_io_kwargs
    middleware mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
    mm_encoder_tp_mode mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
    mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides
    model_impl model_loader_extra_config moe_backend nnodes node_rank numa_bind numa_bind_cpus
    numa_bind_nodes offload_backend offload_group_size offload_num_in_group offload_params
    offload_prefetch_step optimization_level otlp_traces_endpoint override_attention_dtype
    performance_mode pooler_config prefill_context_parallel_size profiler_config
    pt_load_map_location quantization_config ray_workers_use_nsight renderer_num_workers
    response_role revision root_path runner safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads
    show_hidden_metrics_for_version skip_mm_profiling spec_method spec_model spec_tokens
    specialize_active_lora ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile
    tokenizer_mode tokenizer_revision tokens_only tool_call_parser tool_parser_plugin
    tool_server trust_request_chat_template ubatch_size uds video_pruning_rate
    weight_transfer_config worker_extension_cls
    """.split()
)
"""As arguments of `LLM` and, with dashes, as flags."""
SHORT_NOT_BUILT = frozenset(
    "-dc -dcp -dpa -dpb -dpe -dph -dpl -dpm -dpn -dpp -dpr -ep -n -pcp -r".split()
)
"""Their short forms."""


def not_built(option: str) -> str:
    """A sentence on `option`, a flag or an argument, if upstream has it and vllmx hasn't, else
    an empty string."""
    name = option.lstrip("-").replace("-", "_").partition(".")[0]
    if option in SHORT_NOT_BUILT or not NOT_BUILT.isdisjoint((name, name.removeprefix("no_"))):
        return " Upstream has it, vllmx hasn't built it (see reports/ledger.md): leave it out."
    return ""
