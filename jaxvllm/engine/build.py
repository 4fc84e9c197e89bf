"""From an EngineConfig to the parts of an engine: tokenizer, weights, pages, scheduler, runner."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxvllm
from jaxvllm.config import EngineConfig
from jaxvllm.core.page_pool import PagePool, pages_for
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler, check_token_budget
from jaxvllm.core.slots import SlotTable
from jaxvllm.engine.default_params import default_params
from jaxvllm.engine.tokenizer import Tokenizer, eos_token_ids
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.orientation import prefers_in_out, to_in_out
from jaxvllm.models.params import Layout, Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.buckets import BucketLadder, powers_of_two
from jaxvllm.runtime.memory import free_bytes, pages_that_fit, step_bytes
from jaxvllm.runtime.programs import use_persistent_cache
from jaxvllm.runtime.runner import CacheShape, Runner, compile_step
from pallas_kernels.backend import Backend
from sharding.placement import place_on

logger = logging.getLogger(__name__)

# As in vLLM without scales: what goes beyond the range of e4m3, 448, saturates.
PAGE_DTYPES = {
    "fp8": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e5m2": jnp.dtype(jnp.float8_e5m2),
}
DEMO_MODEL = Path(jaxvllm.__file__).parent / "assets" / "demo"


@dataclass(frozen=True)
class EngineParts:
    """What `Engine` is made of."""

    tokenizer: Tokenizer | None  # None: the model directory has none, only token ids go in and out
    make_scheduler: Callable[[], Scheduler]  # with its own slots and pages, all free
    runner: Runner
    spec: ModelSpec
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams


def build(config: EngineConfig) -> EngineParts:
    """Loads the model onto the first device and makes everything around it.

    Raises ValueError (what the user gave is wrong) or NotImplementedError (we cannot run it), naming the file.
    """
    if config.cache_directory is not None:
        use_persistent_cache(config.cache_directory)
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    directory = DEMO_MODEL if config.model == "demo" else checkpoint.resolve(config.model)
    hf_config = checkpoint.read_config(directory)
    spec, max_model_len = _spec(hf_config, config.max_model_len)
    dtype = _dtype(config.dtype, hf_config, on_cpu)
    layout: Layout = "separate" if on_cpu else "stacked"
    params = checkpoint.load(
        directory,
        spec,
        dtype=dtype,
        load_format=config.load_format,
        layout=layout,
        seed=config.seed,
        place=place_on(device),
    )
    if on_cpu and prefers_in_out():
        params = to_in_out(params)
    backend = Backend.of_device(config.attention_backend, device, dtype)
    if on_cpu and config.kv_cache_dtype != "auto":
        # XLA scatters float8 as float16 there, and copies all the pages for it in every layer.
        logger.warning("kv_cache_dtype %s saves no memory on CPU and costs time: use auto", config.kv_cache_dtype)
    max_num_seqs, max_num_batched_tokens = _batch_limits(config, on_cpu)
    check_token_budget(max_num_batched_tokens, max_num_seqs)  # before buckets of these sizes fail to make sense
    ladder = BucketLadder.build(
        _buckets(config.row_buckets, "row_buckets", 1, max_num_seqs),
        _buckets(config.token_buckets, "token_buckets", min(16, max_num_batched_tokens), max_num_batched_tokens),
    )
    max_pages = pages_for(max_model_len, config.page_size)
    smallest = CacheShape(
        num_pages=2,
        page_size=config.page_size,
        num_slots=max_num_seqs,
        max_pages=max_pages,
        dtype=PAGE_DTYPES.get(config.kv_cache_dtype, dtype),
    )
    num_pages = config.num_pages or _num_pages(config, params, spec, ladder, smallest, backend, device)
    runner = Runner(params, spec, replace(smallest, num_pages=num_pages), ladder, backend)
    if config.warm_up == "full":
        runner.programs.wait()
    logger.info("%d pages of %d tokens, %d buckets", num_pages - 1, config.page_size, len(ladder.buckets))

    def make_scheduler() -> Scheduler:
        slots = SlotTable(max_num_seqs, max_model_len, config.page_size)
        pool = PagePool(num_pages, config.page_size, config.enable_prefix_caching)
        return Scheduler(slots, pool, POLICIES[config.scheduler], max_num_batched_tokens)

    tokenizer = _tokenizer(config, directory)
    return EngineParts(
        tokenizer=tokenizer,
        make_scheduler=make_scheduler,
        runner=runner,
        spec=spec,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids(directory) if tokenizer is None else tokenizer.eos_token_ids,
        default_params=default_params(directory),
    )


def _spec(hf_config: dict[str, object], max_model_len: int | None) -> tuple[ModelSpec, int]:
    """The model, and the length it serves: some RoPE scalings depend on it, so it comes first."""
    spec = model_spec(hf_config, max_model_len)
    return spec, max_model_len or spec.max_position


def _batch_limits(config: EngineConfig, on_cpu: bool) -> tuple[int, int]:
    """Requests and tokens of a step; the one that the config leaves open makes room for the other."""
    seqs, tokens = (64, 512) if on_cpu else (256, 2048)
    max_num_seqs = config.max_num_seqs or min(seqs, config.max_num_batched_tokens or seqs)
    return max_num_seqs, config.max_num_batched_tokens or max(tokens, max_num_seqs)


def _dtype(name: str, hf_config: dict[str, object], on_cpu: bool) -> jnp.dtype:
    if name == "auto":
        # XLA emulates bfloat16 on CPU: float32 is several times faster there.
        name = "float32" if on_cpu else checkpoint.config_dtype(hf_config)
    return jnp.dtype(name)


def _buckets(chosen: tuple[int, ...] | None, name: str, smallest: int, largest: int) -> tuple[int, ...]:
    if chosen is None:
        return powers_of_two(smallest, largest)
    if max(chosen) > largest:
        raise ValueError(f"{name} {chosen} go beyond {largest}, the most that a step can have: leave those out")
    return (*chosen, largest)


def _num_pages(
    config: EngineConfig,
    params: Params,
    spec: ModelSpec,
    ladder: BucketLadder,
    smallest: CacheShape,
    backend: Backend,
    device: jax.Device,
) -> int:
    """Pages for what the device has left. On an accelerator XLA tells what the largest step needs; a host pages."""
    struct = smallest.pages(spec, backend)
    room = free_bytes(device, config.memory_utilization)
    if device.platform != "cpu":
        room -= step_bytes(compile_step(params, struct, spec, smallest, ladder.largest, backend, device.platform))
    page_bytes = struct.size * struct.dtype.itemsize // smallest.num_pages
    return pages_that_fit(room, page_bytes, useful=smallest.num_slots * smallest.max_pages + 1)


def _tokenizer(config: EngineConfig, directory: Path) -> Tokenizer | None:
    if config.tokenizer is not None:
        return Tokenizer.from_directory(checkpoint.resolve(config.tokenizer))
    return Tokenizer.from_directory(directory) if Tokenizer.exists_in(directory) else None
