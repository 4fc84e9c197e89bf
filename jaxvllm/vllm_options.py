"""Advice on options of vLLM that have another name here, or that do not exist here."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Options that exist here under another name. The command line takes both names, and the value means the same.
ALIASES: Mapping[str, str] = {
    "gpu_memory_utilization": "memory_utilization",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
}


@dataclass(frozen=True)
class Advice:
    """Advice on what to do instead of giving an option of vLLM, or several options that are one option here."""

    why: str
    field: str | None = None  # our option that has the effect; None: no option is needed
    # The value for our option. "{}" is the value that was given to vLLM's option. In a longer text, {name} stands for
    # the value that was given to vLLM's option `name`.
    value: str = "{}"
    defaults: Mapping[str, str] | None = None  # values for options that `value` names and that were not given

    @property
    def uses_value(self) -> bool:
        """Whether the value that was given to vLLM's option matters to the advice."""
        return self.field is not None and "{" in self.value

    def text(self, given: Mapping[str, Any], known: Collection[str], write: Callable[[str, Any], str]) -> str:
        """Returns the advice for a user who set options of vLLM to the values in `given`.

        `known` are the options that the user may set there, and `write` spells an option with its value.
        """
        why = f" ({self.why})" if self.why else ""
        if self.field is None or self.field not in known:
            return f"leave it out{why}"
        if self.value == "{}":
            value = next(iter(given.values()), "")
        else:
            # A mesh begins with its stages only where somebody has asked for some.
            value = self.value.format_map({**(self.defaults or {}), **given}).removeprefix("x")
        return f"use {write(self.field, value)}{why}"


_MESH = Advice(
    "replicas of the model x devices that each replica is spread over; before them stages, if the layers are divided",
    "mesh",
    "{pipeline_parallel_size}x{data_parallel_size}x{tensor_parallel_size}",
    {"pipeline_parallel_size": "", "data_parallel_size": "1", "tensor_parallel_size": "1"},
)
_IN_PAGES = "keys and values stay on the device, and a request that loses its pages is computed again"
_HOSTS = "one process runs on each host; see docs/scaling.md"
_COORDINATOR = Advice(
    _HOSTS, "coordinator", "{master_addr}:{master_port}", {"master_addr": "HOST", "master_port": "PORT"}
)
_SPECULATION = Advice(
    "ngram, suffix and mtp need no model, and a model may tell its method",
    "speculative_config",
    '{{"method": "{spec_method}", "model": "{spec_model}", "num_speculative_tokens": {spec_tokens}}}',
    {"spec_method": "METHOD", "spec_model": "MODEL", "spec_tokens": "3"},
)
_REQUEST_LOG = "only a server logs requests: one line for each, without its text"

ADVICE: Mapping[str, Advice] = {
    "tensor_parallel_size": _MESH,
    "data_parallel_size": _MESH,
    "pipeline_parallel_size": _MESH,
    "distributed_executor_backend": Advice("one process drives all devices of its host"),
    "spec_method": _SPECULATION,
    "spec_model": _SPECULATION,
    "spec_tokens": _SPECULATION,
    "nnodes": Advice(_HOSTS, "num_processes"),
    "node_rank": Advice(_HOSTS, "process_id"),
    "master_addr": _COORDINATOR,
    "master_port": _COORDINATOR,
    "trust_remote_code": Advice("nothing in a checkpoint is ever executed"),
    "enforce_eager": Advice("every step is a compiled program; there is no other mode"),
    "num_scheduler_steps": Advice("decode steps that one program takes while nothing waits", "max_decode_burst"),
    "multi_step_stream_outputs": Advice("a stream gets tokens as they are read from the device"),
    "enable_chunked_prefill": Advice("by default long prompts are computed in chunks, beside running requests"),
    "no_enable_chunked_prefill": Advice("steps then hold either prompts or answers", "scheduler", "v0"),
    "quantization": Advice("quantized checkpoints are not supported; kv_cache_dtype fp8 halves the KV cache"),
    "swap_space": Advice(_IN_PAGES),
    "cpu_offload_gb": Advice(_IN_PAGES),
    "download_dir": Advice("the environment variable HF_HOME says where downloads are kept"),
    "revision": Advice("give the directory of that revision as the model"),
    "tokenizer_mode": Advice("the tokenizer is read from tokenizer.json, which is always the fast one"),
    "logits_processors": Advice("functions do not cross to another process: give them to LLM, which is offline"),
    "max_seq_len_to_capture": Advice("every step is a compiled program, whatever its lengths"),
    "disable_log_stats": Advice("only a server logs its load, every so many seconds", "log_stats_interval", "inf"),
    "no_disable_log_stats": Advice("a server logs its load in any case"),
    "disable_log_requests": Advice("the texts of requests are never logged"),
    "no_disable_log_requests": Advice(_REQUEST_LOG, "access_log", ""),
    "enable_log_requests": Advice(_REQUEST_LOG, "access_log", ""),
    "no_enable_log_requests": Advice("requests are not logged without --access-log"),
    "disable_uvicorn_access_log": Advice("there is an access log only with --access-log"),
    "no_disable_uvicorn_access_log": Advice("", "access_log", ""),
    "uvicorn_log_level": Advice("only errors of uvicorn are logged; --access-log adds a line for each request"),
    "root_path": Advice("let the proxy in front remove its prefix from the path"),
    "disable_frontend_multiprocessing": Advice("the engine always has a process of its own"),
    "enable_lora": Advice("LoRA adapters are not supported yet"),
    "kv_cache_memory_bytes": Advice("memory_utilization or num_pages limits the KV cache"),
}

# Options with several values that vLLM takes as one JSON list. Here several values may also follow the flag.
JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})

# Short names of the command line.
SHORT_NAMES: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-dp": "data_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
}


def advice_on(name: str) -> Advice | None:
    """Returns the advice on vLLM's option `name`, spelled with underscores, or None when there is no advice on it.

    An option that is switched off has the name `no_...`.
    """
    if name in ALIASES:
        return Advice("", ALIASES[name])
    if name in ADVICE:
        return ADVICE[name]
    opposite = ADVICE.get(name.removeprefix("no_"))
    # When the option needs no option of ours, neither does its opposite. Otherwise our option would do the contrary.
    return opposite if opposite is not None and opposite.field is None else None
