"""The options of vLLM that are none here, and what becomes of each: it changes nothing, it is one of ours, or neither.

vLLM 0.33, vllm/engine/arg_utils.py and vllm/entrypoints/common/cli_args.py. `jaxvllm.vllm_translation` uses the tables.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

# What follows the flag of an option: nothing, because it is a switch, or one value, or several.
type Takes = Literal["nothing", "value", "values"]

# Options that exist here under another name. Both names work, and the value means the same.
ALIASES: Mapping[str, str] = {
    "gpu_memory_utilization": "memory_utilization",
    "device_memory_utilization": "memory_utilization",
    "block_size": "page_size",
    "override_pooler_config": "pooler_config",
    "num_gpu_blocks_override": "num_pages",
    "max_num_queued_reqs": "max_num_queued_requests",
    "eplb": "enable_eplb",
}


@dataclass(frozen=True)
class Unneeded:
    """An option of vLLM that changes no answer here, so that it is accepted and left out."""

    why: str
    takes: Takes = "value"


@dataclass(frozen=True)
class Translated:
    """An option of vLLM, or several of them, that is one of our options."""

    why: str
    field: str  # our option
    # The value of our option. "{}" is the value that was given to vLLM's option. In a longer text, {name} stands for
    # the value that was given to vLLM's option `name`.
    value: str = "{}"
    defaults: Mapping[str, str] | None = None  # values for options that `value` names and that were not given
    takes: Takes = "value"


@dataclass(frozen=True)
class Refused:
    """An option of vLLM that would change answers, or protect or limit something, and that does not exist here."""

    why: str
    takes: Takes = "value"
    neutral: Collection[str] = ()  # values that mean the same as leaving the option out; they are accepted
    field: str | None = None  # our option that comes near; None: the user can only leave the option out
    value: str | None = None  # the value of our option


type Option = Unneeded | Translated | Refused

# Values of options that exist here under the same name: patterns of vLLM's values, and what these are here. None: the
# same as leaving the option out.
VALUES: Mapping[str, Mapping[str, str | Unneeded | Refused | None]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_inc": "fp8"},
    "load_format": {"hf|safetensors|gguf|fastsafetensors|instanttensor|runai_streamer": "auto"},
    "attention_backend": {"[A-Z0-9_]+": "auto"},  # the names of vLLM's kernels
    "max_model_len": {"auto|-1": None},
    "all2all_backend": {
        "naive|pplx": "allgather_reducescatter",  # as in vLLM, which has removed them
        # Kernels that send each token to the devices of its experts.
        "(deepep|mori|flashinfer)_[a-z0-9_]+|moonep|nixl_ep": "ragged_all_to_all",
        "passthrough": None,
    },
    "quantization": {
        "none|null": None,
        "int8|int8_per_channel_weight_only": "int8",
        "fp8|fp8_per_tensor": "fp8",  # a scale for each row, and not one for the matrix
        "int4": "int4",
        "int4_g32": "int4_g32",
        "int8_w8a8": "int8_w8a8",
        "fp8_w8a8|fp8_per_channel": "fp8_w8a8",
        # vLLM takes these for checkpoints that are stored so, and for no others.
        "(auto_)?(awq|gptq)|(awq|gptq)_marlin|moe_wna16|compressed-tensors|fbgemm_fp8|modelopt(_fp4|_mixed)?|gguf": (
            Unneeded("quantized checkpoints are recognized by their config.json")
        ),
        ".*": Refused(
            "NAME is int8, fp8, int4, int4_g32, int8_w8a8 or fp8_w8a8, which are made of any checkpoint; leave it out "
            "if the checkpoint is quantized already, which its config.json tells",
            field="quantization",
            value="NAME",
        ),
    },
}


def _each(option: Option, names: str) -> dict[str, Option]:
    """Returns the same `option` for each of the names in a text."""
    return dict.fromkeys(names.split(), option)


_MESH = Translated(
    "replicas of the model x devices that each replica is spread over; before them stages, if the layers are divided",
    "mesh",
    "{pipeline_parallel_size}x{data_parallel_size}x{tensor_parallel_size}",
    {"pipeline_parallel_size": "", "data_parallel_size": "1", "tensor_parallel_size": "1"},
)
_HOSTS = "one process runs on each host; see docs/scaling.md"
_COORDINATOR = Translated(
    _HOSTS, "coordinator", "{master_addr}:{master_port}", {"master_addr": "HOST", "master_port": "PORT"}
)
_SPECULATION = Translated(
    "ngram, suffix and mtp need no model, and a model may tell its method",
    "speculative_config",
    '{{"method": "{spec_method}", "model": "{spec_model}", "num_speculative_tokens": {spec_tokens}}}',
    {"spec_method": "METHOD", "spec_model": "MODEL", "spec_tokens": "3"},
)
_REQUEST_LOG = "only a server logs requests: one line for each, without its text"
_COMPILED = "every step is a compiled program, and there is no other mode"
_KERNELS = "kernels are chosen for the device and the shapes"
_SCHEDULING = "the scheduler decides this itself, and it changes no answer"
_METRICS = "/metrics and the log have what there is to tell, without being asked"
_TEXT_ONLY = "the models that run here read text only"
_FIXED_EXPERTS = "experts are loaded one after the other, and --enable-eplb moves them"
_NO_STATES = "models with recurrent states are not supported yet"
_IN_PAGES = "keys and values stay on the device, and a request that loses its pages is computed again"
_ONE_PROCESS = "one process drives all devices of its host"
_NO_CODE = "no code is loaded from a name: the package itself can be changed"

OPTIONS: Mapping[str, Option] = {
    # Options that are one of ours.
    **_each(_MESH, "tensor_parallel_size data_parallel_size pipeline_parallel_size"),
    **_each(_COORDINATOR, "master_addr master_port"),
    **_each(_SPECULATION, "spec_method spec_model spec_tokens"),
    "nnodes": Translated(_HOSTS, "num_processes"),
    "node_rank": Translated(_HOSTS, "process_id"),
    "num_scheduler_steps": Translated("decode steps that one program takes while nothing waits", "max_decode_burst"),
    "disable_log_stats": Translated(
        "only a server logs its load, every so many seconds", "log_stats_interval", "inf", takes="nothing"
    ),
    "enable_log_requests": Translated(_REQUEST_LOG, "access_log", "", takes="nothing"),
    "no_disable_log_requests": Translated(_REQUEST_LOG, "access_log", "", takes="nothing"),
    "no_disable_uvicorn_access_log": Translated("", "access_log", "", takes="nothing"),
    # Options that change no answer. How the step is compiled and which kernels it has.
    **_each(Unneeded(_COMPILED, "nothing"), "enforce_eager"),
    **_each(
        Unneeded(_COMPILED),
        "compilation_config optimization_level max_seq_len_to_capture max_cudagraph_capture_size "
        "performance_mode model_impl",
    ),
    "cudagraph_capture_sizes": Unneeded(_COMPILED, "values"),
    **_each(
        Unneeded(_KERNELS),
        "kernel_config attention_config moe_backend linear_backend sparse_indexer_topk_backend "
        "ir_op_priority mamba_backend gdn_prefill_backend kda_prefill_backend kda_decode_backend dcp_comm_backend "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_tp_mode",
    ),
    **_each(
        Unneeded(_KERNELS, "nothing"),
        "enable_flashinfer_autotune monokernel disable_custom_all_reduce disable_cascade_attn use_fp64_gumbel "
        "enable_shm_tensor_arena enable_nccl_comm_suspend enable_cumem_allocator enable_hc_sp "
        "disable_nccl_for_dp_synchronization enable_batch_sharded_sampling enable_flash_late_interaction",
    ),
    # How requests share steps and pages.
    "enable_chunked_prefill": Unneeded("long prompts are computed in chunks, beside running requests", "nothing"),
    **_each(
        Unneeded(_SCHEDULING),
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold max_num_scheduled_tokens "
        "max_num_active_seqs prefill_schedule_interval watermark stream_interval prefix_caching_hash_algo "
        "prefix_cache_retention_interval prefix_match_unit ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold dp_sync_interval swap_space",
    ),
    **_each(
        Unneeded(_SCHEDULING, "nothing"),
        "long_prefill_token_threshold_adaptive scheduler_reserve_full_isl enable_dbo disable_hybrid_kv_cache_manager "
        "kv_sharing_fast_prefill swa_bounded_replay multi_step_stream_outputs no_multi_step_stream_outputs",
    ),
    # How a checkpoint is read.
    "trust_remote_code": Unneeded("nothing in a checkpoint is ever executed", "nothing"),
    "use_tqdm_on_load": Unneeded("a bar is shown where there is a terminal", "nothing"),
    **_each(
        Unneeded("weights are read from safetensors, each part once"),
        "model_loader_extra_config ignore_patterns pt_load_map_location safetensors_load_strategy "
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size max_parallel_loading_workers code_revision",
    ),
    # Processes, devices and hosts.
    **_each(
        Unneeded(_ONE_PROCESS),
        "distributed_executor_backend distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "renderer_num_workers fault_tolerance_config watchdog_config data_parallel_supervisor_port "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold",
    ),
    **_each(
        Unneeded(_ONE_PROCESS, "nothing"),
        "ray_workers_use_nsight numa_bind disable_frontend_multiprocessing enable_fault_tolerance",
    ),
    **_each(Unneeded(_ONE_PROCESS, "values"), "numa_bind_nodes numa_bind_cpus"),
    # What is told about requests and steps.
    **_each(
        Unneeded(_METRICS),
        "otlp_traces_endpoint show_hidden_metrics_for_version kv_cache_metrics_sample custom_histogram_buckets "
        "per_request_spec_decode_metrics jit_monitor_mode profiler_config fingerprint_mode fingerprint_value",
    ),
    "collect_detailed_traces": Unneeded(_METRICS, "values"),
    **_each(
        Unneeded(_METRICS, "nothing"),
        "kv_cache_metrics cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics jit_monitor_verbose "
        "enable_logging_iteration_details enable_mm_processor_stats enable_server_load_tracking "
        "aggregate_engine_logging no_disable_log_stats",
    ),
    "enable_prompt_tokens_details": Unneeded("usage always tells how many tokens were cached", "nothing"),
    "enable_request_id_headers": Unneeded("every answer has the header X-Request-Id", "nothing"),
    "enable_offline_docs": Unneeded("/docs loads nothing from other hosts", "nothing"),
    "fail_on_environ_validation": Unneeded("unknown options are errors here", "nothing"),
    **_each(Unneeded("the texts of requests are never logged", "nothing"), "disable_log_requests enable_log_outputs"),
    **_each(Unneeded("the texts of requests are never logged", "nothing"), "enable_log_deltas"),
    **_each(Unneeded("the texts of requests are never logged"), "max_log_len"),
    "no_enable_log_requests": Unneeded("requests are not logged without --access-log", "nothing"),
    "disable_uvicorn_access_log": Unneeded("there is an access log only with --access-log", "nothing"),
    "log_error_stack": Unneeded("errors of the server itself are always logged whole", "nothing"),
    **_each(
        Unneeded("--access-log adds a line for each request; other lines are few"),
        "uvicorn_log_level log_level logging_config log_config_file disable_access_log_for_endpoints",
    ),
    "sse_keep_alive_interval": Unneeded("no comment lines are sent while a stream is idle"),
    # Images and sounds, and what only other kinds of models have.
    **_each(
        Unneeded(_TEXT_ONLY),
        "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
        "mm_shm_cache_max_object_size_mb mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device "
        "mm_ipc_gpu_memory_gb media_io_kwargs allowed_local_media_path",
    ),
    **_each(
        Unneeded(_TEXT_ONLY, "nothing"),
        "language_model_only skip_mm_profiling interleave_mm_strings mm_device_do_normalize disable_chunked_mm_input "
        "disable_mm_preprocessor_cache trust_request_mm_kwargs",
    ),
    "allowed_media_domains": Unneeded(_TEXT_ONLY, "values"),
    **_each(
        Unneeded(_NO_STATES),
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_cache_philox_rounds "
        "mamba_ssu_algorithm replayssm_buffer_len",
    ),
    **_each(
        Unneeded(_NO_STATES, "nothing"),
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint use_replayssm",
    ),
    **_each(Unneeded(_FIXED_EXPERTS), "expert_placement_strategy elastic_ep_max_dp_size"),
    "enable_ep_weight_filter": Unneeded(_FIXED_EXPERTS, "nothing"),
    "fully_sharded_loras": Unneeded("adapters are divided as the matrices that they change", "nothing"),
    "specialize_active_lora": Unneeded("steps without adapters have programs of their own", "nothing"),
    "max_lora_cls_labels": Unneeded("adapters change no classifier"),
    **_each(Unneeded("/cohere/v2/chat does not exist here"), "cohere_format"),
    "cohere_is_reasoning_model": Unneeded("/cohere/v2/chat does not exist here", "nothing"),
    # Options that are refused, with the values that would change nothing.
    "tokenizer_mode": Refused(
        "the tokenizer is read from tokenizer.json, which is always the fast one",
        neutral=("auto", "hf", "slow"),
    ),
    "config_format": Refused("config.json is read", neutral=("auto", "hf")),
    **_each(
        Refused("quantized checkpoints are recognized by their config.json", neutral=("none", "null")),
        "quantization_config",
    ),
    "kv_cache_dtype_skip_layers": Refused("all layers keep keys and values in one way", neutral=("none", "null")),
    **_each(
        Refused("quantized checkpoints are recognized by their config.json", "nothing"),
        "allow_deprecated_quantization",
    ),
    "calculate_kv_scales": Refused(
        "scales that the first requests decide would change the answers of all others; those of each token do not",
        "nothing",
        field="kv_cache_dtype",
        value="fp8_per_token_head",
    ),
    "no_enable_chunked_prefill": Refused(
        "steps then hold either prompts or answers", "nothing", field="scheduler", value="v0"
    ),
    "kv_cache_memory_bytes": Refused("memory_utilization or num_pages limits the KV cache"),
    **_each(Refused(f"{_IN_PAGES}", neutral=("0",)), "cpu_offload_gb"),
    **_each(Refused(f"{_IN_PAGES}", "values"), "cpu_offload_params offload_params"),
    **_each(
        Refused(f"{_IN_PAGES}", neutral=("auto", "0")),
        "offload_backend offload_group_size offload_num_in_group offload_prefetch_step",
    ),
    **_each(
        Refused(
            "pages then have copies in host memory",
            neutral=("none", "null"),
            field="kv_transfer_config",
            value='{"kv_connector": "host"}',
        ),
        "kv_offloading_size kv_offloading_backend",
    ),
    "download_dir": Refused("the environment variable HF_HOME says where downloads are kept"),
    **_each(
        Refused("give the directory of that revision as the model", neutral=("main", "none")),
        "revision tokenizer_revision",
    ),
    **_each(Refused("give the directory that has it as the model"), "hf_config_path model_weights"),
    "hf_token": Refused("the environment variable HF_TOKEN has the token"),
    "device": Refused("jax finds the devices, and JAX_PLATFORMS=cpu chooses among them", neutral=("auto",)),
    "device_ids": Refused("CUDA_VISIBLE_DEVICES and TPU_VISIBLE_CHIPS choose devices", "values"),
    **_each(
        Refused("every rank has whole sequences", neutral=("1",)),
        "decode_context_parallel_size prefill_context_parallel_size dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size",
    ),
    "dcp_q_replicate": Refused("every rank has whole sequences", "nothing"),
    **_each(
        Refused("this server chooses among its own replicas", "nothing"),
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb",
    ),
    "lora_dtype": Refused("adapters have the dtype of the model", neutral=("auto",)),
    "enable_mixed_moe_lora_format": Unneeded("an engine takes adapters of experts in both forms", "nothing"),
    "enable_moe_shared_loras": Refused("no expert shares its adapter with others", "nothing"),
    "enable_tower_connector_lora": Refused(f"{_TEXT_ONLY}", "nothing"),
    "default_mm_loras": Refused(f"{_TEXT_ONLY}"),
    "runner": Refused("every engine generates text and embeds it", neutral=("auto", "generate", "pooling")),
    "task": Refused("engines generate text and embed it", neutral=("auto", "generate", "embed", "embedding")),
    "convert": Refused("engines generate text and embed it", neutral=("auto", "none", "embed")),
    "skip_tokenizer_init": Refused("a model without a tokenizer takes token ids anyhow", "nothing"),
    "enable_mm_embeds": Refused("prompts are text or token ids", "nothing"),
    "mm_encoder_only": Refused(f"{_TEXT_ONLY}", "nothing"),
    "disable_sliding_window": Refused("a window is what the model was trained with", "nothing"),
    "enable_sleep_mode": Unneeded("every engine can sleep, and --dev-endpoints adds the endpoints", "nothing"),
    "sleep_mode_offload_cudagraph": Refused("compiled programs stay on the devices", "nothing"),
    "sleep_mode_backend": Unneeded("there is one way to sleep"),
    "sleep_preserve_parameter_names": Unneeded("a sleep keeps all weights or none", "values"),
    "weight_transfer_config": Refused(
        "new weights come from directories, by POST /update_weights with --dev-endpoints", neutral=("none", "null")
    ),
    "logits_processors": Refused(
        "functions do not cross to another process: give them to LLM, which is offline", "values"
    ),
    **_each(Refused(f"{_NO_CODE}", "values"), "middleware"),
    **_each(
        Refused(f"{_NO_CODE}", neutral=("auto", "")),
        "worker_cls worker_extension_cls scheduler_cls io_processor_plugin reasoning_parser_plugin tool_parser_plugin",
    ),
    **_each(
        Refused("there is no such feature", neutral=("none", "null", "{}")),
        "additional_config model_class_overrides watermark_config diffusion_config ec_transfer_config "
        "ec_manager_config engram_config aux_output_config reasoning_config tool_server reasoning_effort_map "
        "mamba_config tool_strict_level uds grpc_port",
    ),
    "anthropic_disabled_thinking_effort": Refused("enable_thinking tells the template", neutral=("auto",)),
    "response_role": Refused("answers have the role assistant", neutral=("assistant",)),
    "ssl_cert_reqs": Refused("let a proxy in front check clients' certificates", neutral=("0",)),
    **_each(Refused("let a proxy in front check clients' certificates"), "ssl_ca_certs ssl_ciphers"),
    "enable_ssl_refresh": Refused("start the server again when its certificate changes", "nothing"),
    **_each(
        Refused("there is no such feature", "nothing"),
        "enable_trace_replay return_sampling_mask grpc tokens_only trust_request_chat_template "
        "exclude_tools_when_tool_choice_none",
    ),
    "enable_scale_out": Unneeded("every server has /inference/v1/generate", "nothing"),
    # The members of a JSON object, which dotted flags name too.
    "structured_outputs_config.backend": Unneeded("one library compiles all forms"),
    "guided_decoding_backend": Unneeded("one library compiles all forms"),
    "structured_outputs_config.disable_fallback": Unneeded("one library compiles all forms", "nothing"),
    "structured_outputs_config.reasoning_parser": Translated("", "reasoning_parser"),
    "structured_outputs_config.reasoning_parser_plugin": Refused(f"{_NO_CODE}", neutral=("",)),
    **_each(
        Refused("the form of an answer is what the request says, after the reasoning", "nothing"),
        "structured_outputs_config.disable_any_whitespace structured_outputs_config.disable_additional_properties "
        "structured_outputs_config.enable_in_reasoning",
    ),
    "disable_fastapi_docs": Unneeded("/docs is one page without scripts, and tells nothing of this server", "nothing"),
}

# Options that are a JSON object whose members are looked up in the table one by one.
OBJECTS = frozenset({"structured_outputs_config"})

# Options with several values that vLLM takes as one JSON list. Here several values may also follow the flag.
JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})

# Short names of the command line.
SHORT_NAMES: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-dp": "data_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-ep": "enable_expert_parallel",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-q": "quantization",
    "-asc": "api_server_count",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-dc": "diffusion_config",
    "-O": "optimization_level",
}


def find_option(name: str) -> tuple[Option, bool] | None:
    """Returns what becomes of vLLM's option `name`, spelled with underscores, and whether it is switched on.

    A switch that is off has the name `no_...`, or `disable_...` for `enable_...`. Returns None for an unknown name.
    """
    if name in OPTIONS:
        return OPTIONS[name], True
    for negated in _negated(name):
        option = OPTIONS.get(negated)
        if option is not None and option.takes == "nothing":
            return option, False
    return None


def _negated(name: str) -> list[str]:
    """Returns the names of the switches that `name` turns off."""
    found = [name.removeprefix("no_")] if name.startswith("no_") else []
    for prefix, inverse in (("enable_", "disable_"), ("disable_", "enable_")):
        if name.startswith(prefix):
            found.append(inverse + name.removeprefix(prefix))
    return found
