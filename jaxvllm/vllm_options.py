"""Options of vLLM that have another name here, or none: what to use instead of each."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# The same option under another name. The command line takes both names, and the value means the same.
ALIASES: Mapping[str, str] = {
    "gpu_memory_utilization": "memory_utilization",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
}


@dataclass(frozen=True)
class Advice:
    """What to do instead of giving an option of vLLM."""

    why: str
    field: str | None = None  # our option that has the effect; None: there is none, and none is needed
    value: str = "{}"  # what to give it; {} stands for the value that was given to vLLM's option

    @property
    def uses_value(self) -> bool:
        """Whether the value that was given to vLLM's option matters to the advice."""
        return self.field is not None and "{}" in self.value

    def text(self, given: Any, known: Collection[str], write: Callable[[str, Any], str]) -> str:
        """The advice to somebody who gave that value to vLLM's option.

        `known` are the options that exist where it was given, and `write` says how one is written there with its value.
        """
        why = f" ({self.why})" if self.why else ""
        if self.field is None or self.field not in known:
            return f"leave it out{why}"
        return f"use {write(self.field, given if self.value == '{}' else self.value.format(given))}{why}"


_REPLICAS = "replicas of the model x devices that each is spread over"
_IN_PAGES = "keys and values stay on the device, and a request that loses its pages is computed again"
_HOSTS = "one process a host; see docs/scaling.md"

ADVICE: Mapping[str, Advice] = {
    "tensor_parallel_size": Advice(_REPLICAS, "mesh", "1x{}"),
    "data_parallel_size": Advice(_REPLICAS, "mesh", "{}x1"),
    "pipeline_parallel_size": Advice(
        "every layer is spread over all M devices of --mesh 1xM, layers are never divided"
    ),
    "distributed_executor_backend": Advice("one process drives all devices of its host"),
    "nnodes": Advice(_HOSTS, "num_processes"),
    "node_rank": Advice(_HOSTS, "process_id"),
    "master_addr": Advice(_HOSTS, "coordinator", "{}:PORT"),
    "master_port": Advice(_HOSTS, "coordinator", "HOST:{}"),
    "trust_remote_code": Advice("nothing in a checkpoint is ever executed"),
    "enforce_eager": Advice("every step is a compiled program, there is no other mode"),
    "enable_chunked_prefill": Advice("long prompts are always computed in chunks, beside running requests"),
    "no_enable_chunked_prefill": Advice("steps then hold either prompts or answers", "scheduler", "v0"),
    "quantization": Advice("quantized checkpoints are not supported; kv_cache_dtype fp8 halves the KV cache"),
    "swap_space": Advice(_IN_PAGES),
    "cpu_offload_gb": Advice(_IN_PAGES),
    "download_dir": Advice("the environment variable HF_HOME says where downloads are kept"),
    "revision": Advice("give the directory of that revision as the model"),
    "tokenizer_mode": Advice("a tokenizer.json is read, which is always the fast one"),
    "generation_config": Advice("the model's generation_config.json always counts"),
    "max_logprobs": Advice("20 is the limit here"),
    "max_seq_len_to_capture": Advice("every step is a compiled program, whatever its lengths"),
    "disable_log_stats": Advice("only a server logs its load, every so many seconds", "log_stats_interval", "inf"),
    "disable_log_requests": Advice("the texts of requests are never logged"),
    "enable_log_requests": Advice("only a server logs requests, a line for each without its text", "access_log", ""),
    "disable_uvicorn_access_log": Advice("there is none unless --access-log asks for it"),
    "uvicorn_log_level": Advice("only errors of uvicorn are logged; --access-log adds a line for each request"),
    "root_path": Advice("let the proxy in front take its prefix off the path"),
    "allowed_origins": Advice("pages of other origins get no answer to read; use a proxy of the page's own origin"),
    "disable_frontend_multiprocessing": Advice("the engine always has a process of its own"),
}

# Short names of the command line.
SHORT_NAMES: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-dp": "data_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
}


def advice_on(name: str) -> Advice | None:
    """What to do instead of the option `name`, spelled with underscores; None when vLLM's is not known here."""
    if name in ALIASES:
        return Advice("", ALIASES[name])
    return ADVICE.get(name) or ADVICE.get(name.removeprefix("no_"))
