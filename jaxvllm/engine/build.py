"""Makes the parts of an engine from its config: tokenizer, and each replica's weights, pages, scheduler and runner."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxvllm.config import EngineConfig
from jaxvllm.core.kv_cache import KVCache
from jaxvllm.core.kv_events import KVEventLog
from jaxvllm.core.lora import LoraSlots
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.pooler import Pooler
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.side_input import SideInputRules
from jaxvllm.core.side_store import SideStore
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_sizes import step_overhead
from jaxvllm.engine.page_exchange import make_connector, model_name, page_format
from jaxvllm.engine.page_moves import DeviceMoves, HostMoves, PageMoves
from jaxvllm.engine.page_traffic import PageTraffic
from jaxvllm.engine.pooling import read_pooler
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.engine.startup import StartupClock
from jaxvllm.grammar.request_constraints import RequestConstraints
from jaxvllm.kv_transfer.page_format import PageFormat
from jaxvllm.kv_transfer.versioned_connector import VersionedConnector
from jaxvllm.model_name import resolve
from jaxvllm.models import checkpoint
from jaxvllm.models.families import find_family
from jaxvllm.models.forms import Forms
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.layer_memory import KeysAndValues
from jaxvllm.models.lora import LORA
from jaxvllm.models.params import Params
from jaxvllm.models.published.kv_cache_scheme import stated_kv_scheme
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.stored_forms import held_forms
from jaxvllm.runtime.buckets import NO_DRAFTS, Bucket, BucketLadder, DraftRoom, powers_of_two, row_counts
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.host_heap import keep_temporaries
from jaxvllm.runtime.lockstep import Lockstep
from jaxvllm.runtime.logits_processors import LogitsProcessor
from jaxvllm.runtime.memory import check_chosen_pages, claim_gpu_memory, free_bytes, pages_that_fit
from jaxvllm.runtime.multihost.leader import Leader
from jaxvllm.runtime.multihost.shared_reader import SharedReader
from jaxvllm.runtime.plan_runner import PlanRunner
from jaxvllm.runtime.program_cache import use_persistent_cache
from jaxvllm.runtime.proposers import Proposer
from jaxvllm.runtime.runner import Runner
from jaxvllm.runtime.sampler import SamplerOptions
from jaxvllm.runtime.state import state_bytes
from jaxvllm.runtime.step_program import StepCompiler
from jaxvllm.runtime.stored_programs import StoredPrograms
from jaxvllm.text.generation_config import GenerationDefaults, eos_token_ids, generation_config_file
from jaxvllm.text.reasoning import FORMATS
from jaxvllm.text.tokenizer import Tokenizer
from pallas_kernels.backend import Backend, multiplies_bf16
from sharding.hosts import ALONE, Hosts
from sharding.placement import make_mesh, replica_meshes

if TYPE_CHECKING:
    from jaxvllm.engine.adapter_reader import AdapterReader
    from jaxvllm.models.lora_arrays import LoraArrays

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """The parts of an `Engine`."""

    tokenizer: Tokenizer | None  # None: the model directory has none, only token ids go in and out
    tokenizer_directory: Path | None  # where it was read
    constraints: RequestConstraints | None  # None: there is no tokenizer
    # Of any replica, with its own slots and pages, all free. It tells the log, if there is one, what is cached.
    make_scheduler: Callable[[KVEventLog | None], Scheduler]
    runners: tuple[PlanRunner, ...]  # one a replica, all alike
    # What has weights, pages and programs: these runners themselves, or the one that replicas in lockstep share.
    holders: tuple[Runner, ...]
    lockstep: Lockstep | None  # of replicas that share experts; None: each computes its steps alone
    connector: VersionedConnector | None  # of all replicas; None: their pages stay where they are
    traffic: tuple[PageTraffic | None, ...]  # one a replica
    adapter_reader: "AdapterReader | None"  # None: there is no room for adapters
    # Returns weights for every replica, of arrays by their names in a checkpoint, or of the directory of one. With
    # weights for every replica, the arrays are a part, and the others are these. Raises ValueError for arrays that the
    # model has not.
    read_weights: Callable[[Mapping[str, Any] | Path, Sequence[Params] | None], list[Params]]
    # How pages travel. It waits until all weights were read to name them. Raises NotImplementedError where none can.
    page_format: Callable[[], PageFormat]
    spec: ModelSpec
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    pooler: Pooler
    side_inputs: SideInputRules | None
    startup: StartupClock  # every phase but the first token


def build(
    config: EngineConfig,
    hosts: Hosts = ALONE,
    leader: Leader | None = None,
    logits_processors: tuple[LogitsProcessor, ...] = (),
) -> EngineParts:
    """Loads the model onto the devices of the mesh and makes everything around it.

    With several `hosts` all of them call it, and the first has a `leader`: its runner makes the others' do the same.
    Raises ValueError (what the user gave is wrong) or NotImplementedError (we cannot run it), naming the file.
    """
    clock = StartupClock()
    programs = StoredPrograms(None)
    if config.cache_directory is not None and use_persistent_cache(config.cache_directory):
        programs = StoredPrograms.beside(config.cache_directory)
    claim_gpu_memory(config.memory_utilization)
    with clock.phase("devices"):
        devices = jax.devices()
    if hosts.count > 1 and config.mesh_shape.num_devices < len(devices):
        each = len(devices) // hosts.count
        raise ValueError(
            f"mesh {config.mesh} leaves devices of {hosts.count} processes idle: use 1x{len(devices)}, or "
            f"{hosts.count}x1x{each} with as many stages as processes, or {hosts.count}x{each} with "
            "enable_expert_parallel, for replicas that share experts"
        )
    if config.kv_transfer is not None and config.kv_transfer.stays_on_devices and config.mesh_shape.data > 1:
        raise ValueError(
            f"the transport device is for one replica in a process: use 1xM and not {config.mesh}, or serve with "
            "data_parallel_backend mp"
        )
    mesh = make_mesh(config.mesh_shape, devices)
    meshes = (mesh,) if config.shares_experts else replica_meshes(mesh)
    device = meshes[0].devices.flat[0]
    if device.platform == "cpu":
        keep_temporaries()
    directory = resolve(config.model)
    resolved = ResolvedConfig.of(config, checkpoint.read_config(directory), device.platform, multiplies_bf16(device))
    spec = resolved.spec
    _log_costs(Spread.on(spec, meshes[0]))
    backend = Backend.of_device(config.attention_backend, device, resolved.dtype)
    _log_large_groups(Spread.on(spec, meshes[0]), backend)
    if backend.kind == "gpu" and backend.interpret and meshes[0].size > 1:
        # Its devices find each other's barriers in the one shared memory that it has (jax 0.11.2).
        raise NotImplementedError("attention backend interpret-gpu runs on one device: use interpret, or a mesh of Dx1")
    if config.kv_cache_dtype == "auto" and (scheme := stated_kv_scheme(resolved.hf_config)) is not None:
        if resolved.kv_quantization is not None:
            logger.info("keys and values are kept in %s, as the checkpoint says", resolved.kv_quantization.codes)
        else:
            logger.warning("keys and values stay in the model's dtype: the checkpoint's scheme %r is not known", scheme)
    forms = resolved.forms(backend, meshes[0].size, shards=config.mesh_shape.model)
    lora = _lora_arrays(config, resolved, forms)
    served = spec if lora is None else lora.spec  # with room for adapters
    drafting = None
    if config.drafting is not None:
        from jaxvllm.engine.drafting import Drafting  # 9 ms of imports, and few engines guess

        of_draft = resolved.draft_forms(backend, meshes[0].size)
        drafting = Drafting.of(config.drafting, resolved, directory, of_draft)
    proposer = None if drafting is None else drafting.proposer
    seqs, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
    defaults = GenerationDefaults.read(directory, config.generation_config, config.override_generation_config)
    begins_plain = not defaults.params.has_logit_rules
    ladder = bucket_ladder(config, resolved, device.platform, proposer, begins_plain)
    smallest = resolved.cache_shape(num_pages=2, proposer=proposer)
    # These raise, before weights are read, where there are no such pages, or none for what one device has of the heads.
    smallest.pages(spec, backend, meshes[0])
    smallest.device_bytes(Spread.on(spec, meshes[0]), backend)
    tokenizer_directory = _tokenizer_directory(config, directory)
    with clock.phase("tokenizer"):
        tokenizer = None if tokenizer_directory is None else Tokenizer.from_directory(tokenizer_directory)
    eos = _eos_token_ids(config, directory, tokenizer)
    constraints = None
    if tokenizer is not None and hosts.leads:
        reasoning = None if config.reasoning_parser is None else FORMATS[config.reasoning_parser]
        lenient = config.structured_outputs_lenient
        constraints = RequestConstraints(tokenizer, spec.vocab_size, eos, reasoning, lenient)
    named = cache(lambda: model_name(config, resolved, directory))
    if config.kv_transfer is not None and config.kv_transfer.leaves_engine:
        named()  # beside the reading of the weights, which so come from the disk once
    with clock.phase("weights"):
        replicas = _load(config, directory, resolved, meshes, forms)
        # Weights that replace these have the same forms, whatever they come as.
        held = replace(forms, own=held_forms(replicas[0], Spread.on(spec, meshes[0])))
        for params, mesh in zip(replicas, meshes, strict=True):
            if drafting is not None and (draft := drafting.place(mesh)) is not None:
                params[DRAFT] = draft
            if lora is not None:
                params[LORA] = lora.empty(mesh)
    max_logprobs = spec.vocab_size if config.max_logprobs == -1 else config.max_logprobs
    pooler = read_pooler(config.pooler, resolved.hf_config, spec, directory)
    tells_experts = config.enable_return_routed_experts
    sampling = SamplerOptions(
        config.logprobs_mode, logits_processors, max_logprobs, pooler.kind == "MEAN", tells_experts
    )
    # All weights are there before the room beside them is measured, and all replicas get as many pages.
    with clock.phase("memory"):
        compiler = partial(StepCompiler, sampling=sampling, make=programs.make, proposer=proposer)
        room = _num_pages(config, served, smallest, replicas[0], ladder.largest, backend, meshes, compiler)
        num_pages = hosts.least(room)
    shape = smallest.with_pages(num_pages)

    connector: VersionedConnector | None = None
    traffic: tuple[PageTraffic | None, ...] = (None,) * config.mesh_shape.data

    def read_weights(given: Mapping[str, Any] | Path, kept: Sequence[Params] | None = None) -> list[Params]:
        if isinstance(given, Path):
            try:
                return _load(replace(config, load_format="auto"), given, resolved, meshes, held)
            except OSError as error:  # the directory comes from a caller, who gave no name that can be read
                why = error.strerror or error
                raise ValueError(f"the weights of {str(given)[:200]} cannot be read: {why}") from error
        if kept is not None and config.eplb is not None:
            raise NotImplementedError("with enable_eplb experts have moved: give all weights, not a part of them")
        return _load(config, directory, resolved, meshes, held, given, kept)

    shared_reader = SharedReader(hosts, lambda path: read_weights(path)[0]) if hosts.count > 1 else None

    def make_runner(params: Params, mesh: Mesh) -> Runner:
        # Where all is compiled before the first request, there are no steps to yield to: beside four
        # busy processes on two cores a thread that yields got 0.5% of a core, and one that does not 15%.
        yields = config.warm_up == "background"
        others = (leader, yields, sampling, programs.make, proposer, shared_reader)
        return Runner(params, served, shape, ladder, backend, mesh, *others)

    with clock.phase("programs"):
        holders = _make_all(make_runner, replicas, meshes)
        if config.warm_up == "full":
            if constraints is not None:
                constraints.warm_up()  # beside the compiling
            for holder in holders:
                holder.programs.wait()
        # All processes finish loading before any of them computes, because collectives time out: Gloo's, on CPUs, after
        # 30 s.
        hosts.meet()

    lockstep = Lockstep(*holders) if config.shares_experts else None
    runners: tuple[PlanRunner, ...] = holders if lockstep is None else lockstep.replicas

    @cache
    def page_form() -> PageFormat:
        if config.has_others:
            raise NotImplementedError("requests move between engines of one process each: use one process")
        return page_format(named(), spec, shape, backend, meshes[0])

    if config.kv_transfer is not None:
        is_named = config.kv_transfer.leaves_engine
        form = page_form() if is_named else page_format("", spec, shape, backend, meshes[0])
        rank = config.data_parallel_rank
        connector = VersionedConnector(make_connector(config.kv_transfer, form, holders[0].page_like, rank))
        if config.kv_transfer.stays_on_devices:
            moves: list[PageMoves] = [DeviceMoves(holder, form) for holder in holders]
        else:
            moves = [HostMoves(runner, form) for runner in runners]
        traffic = tuple(PageTraffic(connector, of_replica) for of_replica in moves)
    for size, group in zip(shape.group_sizes(spec), shape.groups(spec), strict=True):
        seen = "all positions" if size.window is None else f"the last {size.window} positions"
        does = "keep a state" if size.keeps_state else f"see {seen}"
        text = "%d pages of %d tokens for %d layers that %s"
        logger.info(text, size.num_pages - 1, config.page_size, len(group.layers), does)
        if group.memory.backend(backend) != backend:
            logger.info("the %s kernels are not for these layers on this device: plain XLA attends", backend.kind)
    logger.info("%d buckets", len(ladder.buckets))
    logger.info("memory of each device, in MiB:\n%s", holders[0].memory_use().table())

    def make_scheduler(events: KVEventLog | None) -> Scheduler:
        cache = KVCache(
            shape.group_sizes(spec),
            num_slots=seqs,
            max_model_len=resolved.max_model_len,
            page_size=config.page_size,
            max_chunk=tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            events=events,
        )
        slots = SlotTable(seqs, resolved.max_model_len)
        side_store = None if shape.side is None else SideStore(shape.side.num_rows)
        lora_slots = LoraSlots(served.num_lora_slots, config.max_lora_heads if config.enable_lora else 0)
        return Scheduler(slots, cache, POLICIES[config.scheduler], tokens, connector, side_store, lora_slots)

    adapter_reader = None
    if lora is not None:
        from jaxvllm.engine.adapter_reader import AdapterReader

        adapter_reader = AdapterReader(lora, all(form.tells_columns for form in held.own.values()))
    clock.ready(programs.num_loaded, programs.num_compiled)
    logger.info("%s", clock.report())

    return EngineParts(
        tokenizer=tokenizer,
        tokenizer_directory=tokenizer_directory,
        constraints=constraints,
        make_scheduler=make_scheduler,
        runners=runners,
        holders=holders,
        lockstep=lockstep,
        connector=connector,
        traffic=traffic,
        adapter_reader=adapter_reader,
        read_weights=read_weights,
        page_format=page_form,
        spec=spec,
        max_model_len=resolved.max_model_len,
        eos_token_ids=eos,
        defaults=defaults,
        pooler=pooler,
        side_inputs=resolved.side_inputs,
        startup=clock,
    )


def _make_all(
    make: Callable[[Params, Mesh], Runner], replicas: Sequence[Params], meshes: Sequence[Mesh]
) -> tuple[Runner, ...]:
    """Returns a runner for each replica. When one cannot be made, the others stop compiling."""
    # A program is compiled for its devices, so each replica compiles its own. XLA lets the others do it meanwhile.
    with ThreadPoolExecutor(len(meshes)) as threads:
        made = [threads.submit(make, params, mesh) for params, mesh in zip(replicas, meshes, strict=True)]
    if any(future.exception() for future in made):
        for future in made:
            if not future.exception():
                future.result().close()
    return tuple(future.result() for future in made)


def _log_costs(spread: Spread) -> None:
    """Logs what a model costs whose heads or layers do not divide over its devices."""
    spec, whole = spread.spec, spread.whole
    # Layers whose attention differs cost differently.
    kinds = zip((layer.attention for layer in spec.layers), (layer.attention for layer in whole.layers), strict=True)
    for own, spread_out in dict.fromkeys(kinds):
        if (copies := own.kv_copies(spread.size)) > 1:
            text = "KV heads: %d over %d devices, so there are %d copies of each, and pages take %d times the memory"
            logger.info(text, own.memory(None).num_kv_heads, spread.size, copies, copies)
        if spread_out.num_heads > own.num_heads:
            text = "query heads: %d over %d devices, so they take the time and memory of %d"
            logger.info(text, own.num_heads, spread.size, spread_out.num_heads)
    if len(set(spread.parts)) > 1:
        text = "stages: they have %s layers, and each has memory for the most of a kind that one of them has"
        logger.info(text, ", ".join(str(len(layers)) for layers in spread.stage_layers))


def _log_large_groups(spread: Spread, backend: Backend) -> None:
    """Logs where more query heads share a KV head than the kernels take."""
    for attention in dict.fromkeys(layer.attention for layer in spread.shard.layers):
        memory = attention.memory(None)
        if not isinstance(memory, KeysAndValues):
            continue
        if memory.attention_backend(attention.num_heads, backend) != memory.backend(backend):
            text = "query heads: %d share a KV head, more than the %s kernels take: plain XLA attends"
            logger.info(text, attention.num_heads // memory.num_kv_heads, backend.kind)


def _load(
    config: EngineConfig,
    directory: Path,
    resolved: ResolvedConfig,
    meshes: Sequence[Mesh],
    forms: Forms,
    tensors: Mapping[str, Any] | None = None,
    kept: Sequence[Params] | None = None,
) -> list[Params]:
    """Returns the weights on each of `meshes`: read once, from `directory` or `tensors`, and copied between devices.

    Arrays of the weights that are `kept`, an entry for each mesh, are used as they are where no tensor replaces them.
    """
    params = checkpoint.load(
        directory,
        resolved.spec,
        dtype=resolved.dtype,
        layout=resolved.layout,
        load_format=config.load_format,
        seed=config.seed,
        mesh=meshes[0],
        hf_config=resolved.hf_config,
        tensors=tensors,
        forms=forms,
        needs_kv_scales=resolved.kv_quantization is not None and resolved.kv_quantization.needs_scales,
        kept=None if kept is None else kept[0],
    )

    def copied(mesh: Mesh) -> Params:
        copy: Params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), params)
        return copy

    def changed(mesh: Mesh, own: Params) -> Params:
        def array(new: Any, first: Any, old: Any) -> Any:
            return old if new is first else jax.device_put(new, NamedSharding(mesh, new.sharding.spec))

        assert kept is not None, "a part is replaced"
        of_mesh: Params = jax.tree.map(array, params, kept[0], own)
        return of_mesh

    if kept is not None:
        return [params, *map(changed, meshes[1:], kept[1:])]
    return [params, *map(copied, meshes[1:])]


def _lora_arrays(config: EngineConfig, resolved: ResolvedConfig, forms: Forms) -> "LoraArrays | None":
    """Makes room for adapters, if the user wants any."""
    if not config.enable_lora:
        return None
    from jaxvllm.models.lora_arrays import LoraArrays, LoraRoom  # 10 ms of imports, and most engines have no room

    places = config.mesh_shape, resolved.layout, resolved.dtype
    family = find_family(resolved.hf_config)
    room = LoraRoom(config.max_loras, config.max_lora_rank, config.lora_target_modules, config.max_lora_heads)
    return LoraArrays.of(resolved.spec, family, *places, forms, room)


def bucket_ladder(
    config: EngineConfig,
    resolved: ResolvedConfig,
    platform: str,
    proposer: Proposer | None = None,
    begins_plain: bool = True,
) -> BucketLadder:
    """Returns the shapes that an engine compiles. Raises ValueError when the config wants larger ones than a step."""
    rows = row_counts(resolved.max_num_seqs, platform)
    tokens = max(resolved.max_num_batched_tokens, rows[-1])
    return BucketLadder.build(
        _buckets(config.row_buckets, "row_buckets", rows),
        _buckets(config.token_buckets, "token_buckets", powers_of_two(min(16, tokens), tokens)),
        # Replicas in lockstep would have to agree in every turn of the loop whether there is another one.
        width=1 if config.shares_experts else config.max_decode_burst,
        drafts=_draft_room(config, step_overhead(on_cpu=platform == "cpu"), proposer),
        begins_plain=begins_plain,
        has_lora=config.enable_lora,
    )


def _buckets(chosen: tuple[int, ...] | None, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    if chosen is None:
        return default
    largest = default[-1]
    if max(chosen) > largest:
        raise ValueError(f"{name} {chosen} go beyond {largest}, the most that a step can have: leave those out")
    return (*chosen, largest)


def _draft_room(config: EngineConfig, overhead: int, proposer: Proposer | None) -> DraftRoom:
    """Returns the drafts that a user has asked for, or those that can hardly do harm."""
    if config.drafting is None:
        return NO_DRAFTS
    count = config.drafting.num_speculative_tokens
    if config.speculative_config is None:
        return DraftRoom.where_they_pay(count, overhead)
    if proposer is None or proposer.cache is None or not proposer.cache.num_layers:  # then seeing a step costs nothing
        return DraftRoom(count)
    return DraftRoom(count, sees_prompts=True, sees_decoding=proposer.sees_all)


def _num_pages(
    config: EngineConfig,
    spec: ModelSpec,
    smallest: CacheShape,
    params: Params,
    largest: Bucket,
    backend: Backend,
    meshes: Sequence[Mesh],
    compiler: Callable[..., StepCompiler],
) -> int:
    """Returns how many pages each replica's first group has: as configured, or as the fullest device has room for.

    On an accelerator XLA tells what the largest step needs; a host pages.
    """
    spread = Spread.on(spec, meshes[0])
    devices = [device for mesh in meshes for device in mesh.local_devices]

    def pool_bytes(num_pages: int) -> int:
        return smallest.with_pages(num_pages).device_bytes(spread, backend)

    if config.num_pages is not None:
        check_chosen_pages(config.num_pages, pool_bytes(config.num_pages), devices)
        return config.num_pages
    room = min(free_bytes(device, config.memory_utilization) for device in devices)
    if devices[0].platform == "cpu":
        room //= len(devices)  # they are all this host
    else:
        pages = smallest.pages(spec, backend, meshes[0])
        room -= compiler(params, pages, spec, smallest, backend, meshes[0]).compile(largest).step_bytes
    room -= state_bytes(smallest.sizes(spec))
    return pages_that_fit(room, pool_bytes, smallest.useful_pages(spec))


def _eos_token_ids(config: EngineConfig, directory: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the tokens that end a completion. A checkpoint's generation_config.json always counts.

    The tokenizer may be another checkpoint's, and then so are its ids.
    """
    if config.generation_config in ("auto", "vllm"):
        return eos_token_ids(directory) if tokenizer is None else tokenizer.eos_token_ids
    own = None if tokenizer is None else tokenizer.eos_token_id
    return eos_token_ids(directory, own, generation_config_file(directory, config.generation_config))


def _tokenizer_directory(config: EngineConfig, directory: Path) -> Path | None:
    if config.tokenizer is not None:
        return resolve(config.tokenizer)
    return directory if Tokenizer.exists_in(directory) else None
