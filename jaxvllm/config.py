"""`EngineConfig`: all options of an engine, validated once and never changed."""

import difflib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from jaxvllm.core.eplb_config import EplbConfig
from jaxvllm.core.kv_events_config import KVEventsConfig
from jaxvllm.core.kv_transfer_config import KVTransferConfig
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.pooler_config import PoolerConfig
from jaxvllm.core.sampling_params import LogprobsMode
from jaxvllm.core.speculative_config import DEFAULT_SPECULATION, SpeculativeConfig
from jaxvllm.core.value_checks import MAX_INT32, json_object
from jaxvllm.ranges import Count, Range, Seed, Share, Tokens, check_ranges
from jaxvllm.text.generation_config import checked_override
from jaxvllm.text.reasoning import FORMATS
from jaxvllm.vllm_options import Refused, Unneeded
from jaxvllm.vllm_translation import translate, translated_value
from pallas_kernels.backend import BackendName
from sharding.mesh import MeshShape

logger = logging.getLogger(__name__)

_HOST_PORT = re.compile(r".+:([1-9]\d{0,4})")
# The names in `jaxvllm.models.forms.QUANTIZATIONS`, as a test checks.
Quantization = Literal["int8", "fp8", "int4", "int4_g32", "int8_w8a8", "fp8_w8a8"]
All2AllBackend = Literal["allgather_reducescatter", "ragged_all_to_all"]
# A test checks that `jaxvllm.engine.kv_cache_dtype` knows all of them.
KVCacheDtype = Literal[
    "auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head",
    "fp8_per_token_head"
]  # fmt: skip
PAGE_SIZES = (16, 32, 64, 128)
# A step's outputs have room for this many tokens in each row, and for their log-probabilities.
MAX_BURST = 64
# The host has arrays of this size, and devices programs: what no machine computes is refused before it is allocated.
MOST_SEQS, MOST_TOKENS = 2**20, 2**24
Seqs = Annotated[int, Range(1, MOST_SEQS)]
StepTokens = Annotated[int, Range(1, MOST_TOKENS)]
Burst = Annotated[int, Range(1, MAX_BURST)]
Logprobs = Annotated[int, Range(-1, MAX_INT32)]
# What only those need who can name an adapter in a request.
LORA_FIELDS = (
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "max_lora_heads",
    "max_cpu_loras",
    "lora_target_modules",
)
# What has more slots than that has a wrong number: a thousandth of a model each, they take more room than the model.
MAX_LORAS = 4096
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
Loras = Annotated[int, Range(1, MAX_LORAS)]
LoraHeads = Annotated[int, Range(0, MAX_LORAS)]
LoraRank = Annotated[int, Range(min(LORA_RANKS), max(LORA_RANKS))]
PageSize = Annotated[int, Range(min(PAGE_SIZES), max(PAGE_SIZES))]
Rank = Annotated[int, Range(0, 65535)]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of an engine. Options of vLLM keep their names and meanings. None lets the engine choose."""

    model: str = "demo"  # a directory in Hugging Face format, a .gguf file, DIR:Q4_K_M, a hub name, or "demo", of ours
    tokenizer: str | None = None  # a directory or hub name; None: the model's
    hf_overrides: str = "{}"  # what replaces values of the model's config.json, as JSON: {"rope_theta": 1e6}
    generation_config: str = "auto"  # default sampling: auto: as the model says; vllm: neutral; or a directory
    override_generation_config: str = "{}"  # default sampling parameters that win, as JSON: {"temperature": 0.5}
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights from the config alone
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's, or float32 on many CPUs
    quantization: Quantization | None = None  # of layers' matrices; None: in --dtype, or as a checkpoint is quantized
    # Each device has some experts whole, and not a part of each. The replicas of a mesh share them, and step together.
    enable_expert_parallel: bool = False
    # How tokens come to the experts that replicas share: every device gathers all of them, or each is sent where it is
    # wanted. None: on TPUs what sends less, by docs/scaling.md, and the first on other devices.
    all2all_backend: All2AllBackend | None = None
    enable_eplb: bool = False  # experts move between devices while the engine serves, by how many tokens choose them
    # When experts move, and how many copies there are, as JSON: {"num_redundant_experts": 8}. None: vLLM's defaults.
    eplb_config: str | None = None
    count_expert_loads: bool = False  # count how many tokens choose each expert, which enable_eplb does anyhow
    # Completions say which experts each of their tokens has chosen. Each decode step is one program then, and no prefix
    # is read from the cache.
    enable_return_routed_experts: bool = False
    kv_cache_dtype: KVCacheDtype = "auto"  # of keys and values; auto: that of --dtype, unless a checkpoint says another
    enable_lora: bool = False  # requests may name adapters, see docs/lora.md
    max_loras: Loras = 1  # adapters that the devices have room for at once, and a step may use
    max_lora_rank: LoraRank = 16  # of an adapter; smaller ranks are filled up with zeros
    # Of max_loras, how many may have an LM head or an embedding whole (modules_to_save), each as large as the model's.
    max_lora_heads: LoraHeads = 0
    max_cpu_loras: Count | None = None  # adapters that are kept in host memory; None: as many as max_loras
    # Names, or parts of names, of the modules that have room for adapters, such as q_proj or self_attn. None: all.
    lora_target_modules: tuple[str, ...] | None = None
    seed: Seed = 0  # seed of dummy weights, and of the seeds for requests without one
    max_model_len: Tokens | None = None  # tokens, prompt and output together; None: the model's own
    max_num_seqs: Seqs | None = None  # requests running at once in each replica; None: 64 on CPU, 256 elsewhere
    max_num_batched_tokens: StepTokens | None = None  # tokens in a replica's step; None: 512 on CPU, 2048 elsewhere
    attention_backend: BackendName = "auto"  # auto: the device's kernels; interpret: run slowly on the CPU
    page_size: PageSize = 16  # tokens in a page; small pages share prefixes more finely, large ones are faster to read
    # KV pages of each replica. Where some layers have a window, these are the pages of the layers that see most, and
    # those of the others follow. None: as many as fit into memory_utilization.
    num_pages: Tokens | None = None
    memory_utilization: Share = 0.9  # share of a device's memory (on CPU: of the free memory) that the engine may take
    enable_prefix_caching: bool = True  # requests that begin with the same tokens share the pages of those tokens
    enable_prompt_embeds: bool = False  # a prompt may be an array of embeddings, for which each device has a store
    async_scheduling: bool = True  # the host plans a step while the devices compute the one before it
    scheduler: str = "v1"  # what may share a step: static, continuous, v0 or v1
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # requests wait in the order of arrival, or of priority
    # Tells routers what each replica has cached, as JSON: {"enable_kv_cache_events": true}. None: nobody is told.
    kv_events_config: str | None = None
    # Which of several replicas gets a request: the one with the fewest requests; the one that soonest has the prompt
    # computed, given what it has cached and has to do; or the one that has the request's session.
    routing_policy: Literal["least-load", "prefix", "session"] = "least-load"
    # Replicas of the model x devices that each replica is spread over; 2x1x8: two stages, each has half of the layers.
    mesh: str = "1x1"
    data_parallel_rank: Rank = 0  # the number of this engine among equal ones: added to the ports of its KV events
    multihost: bool = False  # the mesh spans several hosts, and the environment (a TPU pod, Slurm) says which
    coordinator: str | None = None  # HOST:PORT, any free port on the host of process 0
    num_processes: Count | None = None  # processes that make up the mesh, usually one on each host
    process_id: Rank | None = None  # the number of this process; process 0 takes the requests, the others follow it
    row_buckets: tuple[Seqs, ...] | None = None  # decode batches to compile; None: powers of two, CPU: more, TPU: not 1
    token_buckets: tuple[StepTokens, ...] | None = None  # prefill step sizes to compile; None: powers of two from 16
    max_decode_burst: Burst = 32  # decode steps that one program may take while no request waits; 1: never several
    speculation: bool = True  # guess tokens and verify several in one step, where that is measured to be quicker
    # What guesses, as JSON: {"method": "ngram", "num_speculative_tokens": 3}. None: the tokens that a request repeats,
    # and programs for that are compiled only when requests do repeat themselves.
    speculative_config: str | None = None
    # What keeps KV pages beyond the pool or carries them to other engines, as JSON: {"kv_connector": "host"}.
    kv_transfer_config: str | None = None
    # How prompts become vectors, as JSON: {"pooling_type": "MEAN"}. None: as the checkpoint says, or the last token.
    pooler_config: str | None = None
    warm_up: Literal["background", "full"] = "background"  # full: compile every bucket before the first request
    max_logprobs: Logprobs = 20  # the most log-probabilities that a request may want of each token; -1: all
    logprobs_mode: LogprobsMode = "raw_logprobs"  # what is told: the model's own distribution, or what is drawn from
    structured_outputs_lenient: bool = False  # ignore what cannot be enforced of a JSON schema, and warn in the output
    reasoning_parser: str | None = None  # the marks of the model's reasoning, by vLLM's names; None: it has none
    max_outputs_per_second: Count | None = None  # chunks to all streams together; None: no limit, in serve 500 a core
    compilation_cache: str | None = "~/.cache/jaxvllm/xla"  # where compiled programs are kept; "": nowhere

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Makes a config of keyword options, by our names or vLLM's; one log line names those that change nothing.

        Raises TypeError for an option that is unknown or refused, and says what to give instead.
        """
        names = [field.name for field in fields(cls)]
        ours = {name: translated_value(name, value) for name, value in options.items() if name in names}
        ours = {name: value for name, value in ours.items() if not isinstance(value, Unneeded | Refused)}
        foreign = {name: value for name, value in options.items() if name not in ours}
        translation = translate(foreign, ours, names, _Keywords())
        problems = [*translation.problems, *(f"unknown option {_nearest(name, names)}" for name in translation.unknown)]
        if problems:
            raise TypeError("; ".join(problems))
        if translation.note is not None:
            logger.info("%s", translation.note)
        return cls(**ours, **translation.options)

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), field.type
            if get_origin(allowed) is Literal and value not in get_args(allowed):
                raise ValueError(f"{field.name} must be one of {', '.join(get_args(allowed))}, not {value!r}")
            if allowed is bool and type(value) is not bool:
                raise ValueError(f"{field.name} must be True or False, not {value!r}")
        if self.quantization not in (None, *get_args(Quantization)):
            raise ValueError(
                f"quantization must be one of {', '.join(get_args(Quantization))} or None, not {self.quantization!r}: "
                "quantized checkpoints are recognized by their config.json, and these are made of any checkpoint"
            )
        if self.all2all_backend not in (None, *get_args(All2AllBackend)):
            raise ValueError(
                f"all2all_backend must be one of {', '.join(get_args(All2AllBackend))} or None, "
                f"not {self.all2all_backend!r}"
            )
        overrides = json_object("hf_overrides", self.hf_overrides)
        object.__setattr__(self, "hf_overrides", json.dumps(overrides))
        object.__setattr__(self, "override_generation_config", checked_override(self.override_generation_config))
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", str(SpeculativeConfig.read(self.speculative_config)))
            if not self.speculation:
                raise ValueError("speculative_config says what guesses, and speculation is off: leave one of them out")
        if self.kv_transfer_config is not None:
            object.__setattr__(self, "kv_transfer_config", str(KVTransferConfig.read(self.kv_transfer_config)))
            if not self.enable_prefix_caching:
                raise ValueError("kv_transfer_config needs the prefix cache, which is where pages arrive: leave it on")
            if self.has_others:
                raise ValueError("kv_transfer_config is for an engine of one process: leave it out")
        if self.pooler_config is not None:
            object.__setattr__(self, "pooler_config", str(PoolerConfig.read(self.pooler_config)))
        if self.kv_events_config is not None:
            object.__setattr__(self, "kv_events_config", str(KVEventsConfig.read(self.kv_events_config)))
            if self.kv_events is not None and not self.enable_prefix_caching:
                raise ValueError("kv_events_config tells what is cached, and enable_prefix_caching is off: change one")
        if self.eplb_config is not None:
            object.__setattr__(self, "eplb_config", str(EplbConfig.read(self.eplb_config)))
            if not self.enable_eplb:
                raise ValueError("eplb_config says how experts move, and enable_eplb is off: set it, or leave this out")
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ValueError("enable_eplb moves whole experts between devices: set enable_expert_parallel, too")
        check_ranges(self, written_as_flags=False)
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, not {self.page_size!r}")
        if self.max_lora_rank not in LORA_RANKS:
            raise ValueError(f"max_lora_rank must be one of {LORA_RANKS}, not {self.max_lora_rank!r}")
        if self.enable_lora:
            self._check_lora()
        if self.scheduler not in POLICIES:
            raise ValueError(f"scheduler must be one of {', '.join(POLICIES)}, not {self.scheduler!r}")
        if self.coordinator is not None:
            match = _HOST_PORT.fullmatch(str(self.coordinator))
            if match is None or int(match[1]) > 65535:
                raise ValueError(f"coordinator must be HOST:PORT, not {self.coordinator!r}")
        if self.reasoning_parser is not None and self.reasoning_parser not in FORMATS:
            raise ValueError(f"reasoning_parser must be one of {', '.join(FORMATS)}, not {self.reasoning_parser!r}")
        index, count = self.process_id, self.num_processes
        if index is not None and (type(index) is not int or index < 0 or (count is not None and index >= count)):
            raise ValueError(f"process_id must be from 0 to below num_processes, not {index!r}")
        # `str`, so that (1, 8) and 8 get an error that says what to write.
        if MeshShape.parse(str(self.mesh)).stages > 1:
            self._check_guesses_of_tokens(f"mesh {self.mesh} divides the layers among stages", "or a mesh of DxM")
        if self.enable_prompt_embeds:
            self._check_guesses_of_tokens("enable_prompt_embeds lets prompts have no tokens", "or leave one out")
        for name in ("row_buckets", "token_buckets"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, tuple | list) and value):
                raise ValueError(f"{name} must be a tuple of positive integers, not {value!r}")

    def _check_lora(self) -> None:
        """Raises ValueError for what does not go together with adapters."""
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras {self.max_cpu_loras} must be at least max_loras {self.max_loras}: what is on the "
                "devices is in host memory, too"
            )
        if self.max_lora_heads > self.max_loras:
            raise ValueError(
                f"max_lora_heads {self.max_lora_heads} must be at most max_loras {self.max_loras}: raise max_loras, or "
                "lower it"
            )
        targets = self.lora_target_modules
        if targets is not None and not (targets and all(isinstance(one, str) and one for one in targets)):
            raise ValueError(f"lora_target_modules must be a tuple of names of modules, not {targets!r}")

    def _check_guesses_of_tokens(self, why: str, way_out: str) -> None:
        """Raises NotImplementedError where what guesses tokens computes something itself, which `why` rules out."""
        if (drafting := self.drafting) is not None and drafting.method not in ("ngram", "suffix"):
            raise NotImplementedError(
                f"{why}, and drafts of a model or head are not supported there: use the method ngram or suffix, "
                f"{way_out}"
            )

    @property
    def shares_experts(self) -> bool:
        """Whether the replicas of the mesh share experts, and compute their steps together."""
        return self.enable_expert_parallel and self.mesh_shape.data > 1

    @property
    def all_to_all(self) -> bool | None:
        """Whether tokens are sent only to devices that have their experts; None: the engine chooses."""
        return None if self.all2all_backend is None else self.all2all_backend == "ragged_all_to_all"

    @property
    def counts_loads(self) -> bool:
        """Whether it is counted how many tokens choose each expert."""
        return self.count_expert_loads or self.enable_eplb

    @property
    def eplb(self) -> EplbConfig | None:
        """The way in which experts move by load, or None if they do not."""
        if not self.enable_eplb:
            return None
        return EplbConfig() if self.eplb_config is None else EplbConfig.read(self.eplb_config)

    @property
    def has_others(self) -> bool:
        """Whether this process is one of several."""
        return self.multihost or any(x is not None for x in (self.coordinator, self.num_processes, self.process_id))

    @property
    def drafting(self) -> SpeculativeConfig | None:
        """The way in which drafts are made, or None if there are none."""
        if not self.speculation:
            return None
        return (
            DEFAULT_SPECULATION if self.speculative_config is None else SpeculativeConfig.read(self.speculative_config)
        )

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """The way in which pages travel, or None if they do not."""
        return None if self.kv_transfer_config is None else KVTransferConfig.read(self.kv_transfer_config)

    @property
    def pooler(self) -> PoolerConfig:
        """The operator's choice of how prompts become vectors."""
        return PoolerConfig() if self.pooler_config is None else PoolerConfig.read(self.pooler_config)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """The way in which KV events are published, or None if they are not."""
        config = None if self.kv_events_config is None else KVEventsConfig.read(self.kv_events_config)
        return config if config is not None and config.publishes else None

    def overridden(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config.json of the model with `hf_overrides`. Objects in it are changed member by member."""
        return _merged(hf_config, json_object("hf_overrides", self.hf_overrides))

    @property
    def mesh_shape(self) -> MeshShape:
        return MeshShape.parse(self.mesh)

    @property
    def cache_directory(self) -> Path | None:
        return Path(self.compilation_cache).expanduser() if self.compilation_cache else None


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values` with `changes`."""
    merged = dict(values)
    for name, change in changes.items():
        old = merged.get(name)
        are_objects = isinstance(old, Mapping) and isinstance(change, Mapping)
        merged[name] = _merged(old or {}, change) if are_objects else change
    return merged


class _Keywords:
    """Options as they are written in Python: a `vllm_translation.Spelling`."""

    def ours(self, field: str, value: str) -> str:
        return f"{field}={value!r}"

    def given(self, name: str) -> str:
        return name


def _nearest(name: str, names: list[str]) -> str:
    """Returns an unknown name with the known one that may have been meant, or with all that are known."""
    near = difflib.get_close_matches(name, names, 1)
    return f"{name!r}: " + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}")
