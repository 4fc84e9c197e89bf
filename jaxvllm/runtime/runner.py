"""The runner: owns everything on the devices of a mesh, and makes every call that changes it."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxvllm.core.lora import LoraAdapter
from jaxvllm.core.step_sizes import step_overhead
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.lora import LORA, without_adapters
from jaxvllm.models.params import Params, head_of
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.adapter_fills import AdapterFill, AdapterFills
from jaxvllm.runtime.buckets import BucketLadder
from jaxvllm.runtime.cache_shape import AbstractCachePages, CacheShape, KVCachePages
from jaxvllm.runtime.expert_loads import take_loads
from jaxvllm.runtime.expert_slots import ExpertSlots
from jaxvllm.runtime.forks import pack_forks
from jaxvllm.runtime.memory import MemoryUse
from jaxvllm.runtime.multihost.calls import (
    Admit,
    AdmitRare,
    Call,
    Close,
    DropWeights,
    EmptyAdapters,
    FillAdapter,
    FillSideRows,
    ForkSlots,
    Forward,
    Mask,
    ParkWeights,
    PlaceExperts,
    Read,
    ReadWeights,
    Recall,
    Recount,
    ReleasePages,
    Reset,
    SampleRows,
    SampleSome,
    Step,
    TakeLoads,
    UnparkWeights,
)
from jaxvllm.runtime.multihost.leader import Leader
from jaxvllm.runtime.page_copies import COPY_BATCH, PageContents, PageCopier
from jaxvllm.runtime.parked_params import are_dropped, are_parked, parked, restored
from jaxvllm.runtime.plan_runner import PlanRunner, StepResult
from jaxvllm.runtime.programs import Programs
from jaxvllm.runtime.proposers import Proposer
from jaxvllm.runtime.readouts import DEVICE_READOUTS, Forwarded
from jaxvllm.runtime.recipe import Recipe
from jaxvllm.runtime.sampler import DEFAULT_OPTIONS, SamplerOptions
from jaxvllm.runtime.side_rows import store_side_rows
from jaxvllm.runtime.slot_fields import SlotSizes
from jaxvllm.runtime.state import (
    RECALL_WORDS,
    DeviceState,
    admit,
    admit_rare,
    new_state,
    pack_admissions,
    pack_nothing_rare,
    recall,
    recount,
)
from jaxvllm.runtime.step_program import StepCompiler
from jaxvllm.runtime.token_mask import pack_masks, store_masks
from jaxvllm.runtime.untouched import register_untouched, untouched
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import codes_of
from sharding.axis import EachReplica
from sharding.placement import EVERYWHERE, OF_REPLICAS, of_replicas
from sharding.rules import DATA


class Runner(PlanRunner):
    """Parameters, pages and slot state on the devices, and the compiled steps over them.

    On a mesh of several replicas, which then share experts, it has the pages and states of all of them, and what it
    packs and computes has a part for each. `runtime/lockstep.py` makes its calls there.
    """

    def __init__(
        self,
        params: Params,
        spec: ModelSpec,
        shape: CacheShape,
        ladder: BucketLadder,
        backend: Backend,
        mesh: Mesh,
        leader: Leader | None = None,
        yields: bool = True,
        sampling: SamplerOptions = DEFAULT_OPTIONS,
        make_program: Callable[[Recipe], jax.stages.Compiled] = Recipe.compile,
        proposer: Proposer | None = None,
        read_weights: Callable[[Path], Params] | None = None,
    ):
        """Allocates pages and state on `mesh` and compiles the first bucket; the others follow in the background.

        With a `leader`, the processes that follow it have devices of the mesh too, and do what this runner does. Then
        all have a `SharedReader` to `read_weights`. For `yields` see `Programs`.
        """
        self.shape = shape
        # Whether a step with drafts takes longer after steps without.
        self.proposer_catches_up = proposer is not None and proposer.cache is not None and not proposer.sees_all
        self._leader = leader
        self._params = params
        self._read_weights = read_weights
        self._trouble: ValueError | None = None  # why weights could not be read when they were read last
        pages, state = shape.pages(spec, backend, mesh), shape.state(spec, mesh)
        self.sizes = shape.sizes(spec)
        self.side = shape.side
        self.num_replicas = mesh.shape[DATA]
        self._replica_devices = mesh.size // self.num_replicas
        self.overhead = step_overhead(on_cpu=mesh.devices.flat[0].platform == "cpu")
        self._is_on_host = mesh.devices.flat[0].platform == "cpu"
        # Interpreted kernels compute in NumPy, which warns where memory that was never written happens to hold NaN.
        self._pages_grow = self._is_on_host and not backend.interpret
        if self._pages_grow:
            register_untouched()
        self._kv_pages: KVCachePages
        self._state: DeviceState
        self._forwarded: Forwarded | None = None  # of a step whose second half is held back
        self._loads: jax.Array | None = None  # of experts, that were taken last

        def compile_update(update: Callable[..., DeviceState], kind: type[Call]) -> Callable[..., DeviceState]:
            words = self.unchanging[kind]
            return make_program(Recipe.changing(update, (state, of_replicas(mesh, words.shape, words.dtype)), mesh))

        tokens = np.zeros(RECALL_WORDS, np.int32)
        # The words of the calls that change the state of a replica, if they change nothing.
        self.unchanging: dict[type[Call], NDArray[np.int32]] = {
            Admit: pack_admissions((), self.sizes),
            AdmitRare: pack_nothing_rare(self.sizes),
            Recall: tokens,
            Recount: tokens,
            Mask: pack_masks((), self.sizes),
            ForkSlots: pack_forks((), self.sizes),
        }
        # Few requests need these. So the first request of another kind does not wait for them.
        self._admit_rare = cache(lambda: compile_update(partial(admit_rare, sizes=self.sizes), AdmitRare))
        self._recall = cache(lambda: compile_update(recall, Recall))
        self._recount = cache(lambda: compile_update(recount, Recount))
        self._store_masks = cache(lambda: compile_update(store_masks, Mask))

        # Not the weights themselves: they must be free after `close`.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        compiler = StepCompiler(shapes, pages, spec, shape, backend, mesh, sampling, make_program, proposer)
        self._fork = cache(compiler.compile_fork)
        self._copier = PageCopier(pages, len(shape.groups(spec)), mesh, make_program)
        self._adapter_fills = AdapterFills(shapes, spec, mesh, make_program) if spec.has_lora else None
        # By replica and slot: those whose arrays on the devices depend on the weights there, for ratios or places.
        self._bound_to_weights: dict[tuple[int, int], LoraAdapter] = {}
        # Experts that move, and nothing where they stay.
        slots = ExpertSlots(Spread.on(spec, mesh), params, mesh, make_program)
        self.expert_slots = slots if slots.ffns else None
        loads = shape.loads(spec)
        self.load_shape = None if loads is None else (loads.num_layers, loads.num_experts)
        if loads is not None:
            # The process that places experts need not have devices of all replicas.
            where = jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, EVERYWHERE)
            self._take_loads = make_program(Recipe(take_loads, (state,), mesh, donates=(0,), out_shardings=where))
        rarely: list[Callable[[], object]] = [
            self._admit_rare,
            self._recall,
            self._recount,
            self._store_masks,
            self._fork,
        ]
        if self._adapter_fills is not None:
            rarely.append(self._adapter_fills.compile_ratios)
        if shape.side is not None:
            self.unchanging[FillSideRows] = shape.side.nothing()
            self._fill_side_rows = cache(partial(compile_update, store_side_rows, FillSideRows))
            rarely.append(self._fill_side_rows)
        with ThreadPoolExecutor(1) as other:
            # Beside the steps, whose tracing leaves a core free: 0.2 s of the CPU.
            begin = partial(_new_cache, _of_a_device(pages), self.sizes, pages_grow=self._pages_grow)
            places = jax.tree.map(lambda x: x.sharding.spec, pages), OF_REPLICAS
            new_cache_later = other.submit(make_program, Recipe(begin, (), mesh, out_specs=places))
            admit_later = other.submit(compile_update, partial(admit, sizes=self.sizes), Admit)
            afterwards = (*rarely, compiler.compile_readouts)
            self.programs = Programs(ladder, compiler.compile, yields, afterwards)
            self._new_cache, self._admit = new_cache_later.result(), admit_later.result()
        self._kv_pages, self._state = self._new_cache()

    def part(self, result: StepResult, replica: int) -> StepResult:
        """Returns the part of the result that one of several replicas has, as if it had computed alone."""
        first = replica * self._replica_devices

        def of_replica(value: Any) -> Any:
            return value.trees[replica] if isinstance(value, EachReplica) else value.addressable_data(first)

        part: StepResult = jax.tree.map(of_replica, result, is_leaf=lambda value: isinstance(value, EachReplica))
        return part

    def reset(self) -> None:
        """Makes pages and state as new. A step that broke off may have taken (donated) the old ones along."""
        self.call(Reset())

    def read_pages(self, pages: np.ndarray, group: int = 0) -> np.ndarray:
        """Returns the KV of a group's `pages` on the host, to look at: f[layers of the group, len(pages), ...].

        Codes are without their scales.
        """
        codes = codes_of(self._kv_pages[group])
        if not codes.is_fully_addressable:
            raise NotImplementedError("pages on devices of several processes cannot be read by one: use one process")
        return np.asarray(codes[:, pages])

    def take_pages(self, pages: Sequence[NDArray[np.int32]], replica: int = 0) -> list[PageContents]:
        """Does what `PlanRunner.take_pages` says, for one replica of the mesh."""
        return self._copier.take(self._kv_pages, pages, replica)

    def put_pages(
        self, pages: Sequence[NDArray[np.int32]], contents: Sequence[NDArray[np.generic]], replica: int = 0
    ) -> None:
        """Does what `PlanRunner.put_pages` says, for one replica of the mesh."""
        for first in range(0, len(pages[0]), COPY_BATCH):
            some = slice(first, first + COPY_BATCH)
            arrays = zip((array[some] for array in contents), self._copier.contents_like[replica], strict=True)
            on_device = tuple(jax.device_put(_filled_up(array, like.shape), like.sharding) for array, like in arrays)
            self.put_contents([of_group[some] for of_group in pages], on_device, replica)

    def put_contents(self, pages: Sequence[NDArray[np.int32]], contents: PageContents, replica: int = 0) -> None:
        """Fills at most `COPY_BATCH` pages with what is on the devices already, and returns at once."""
        self._kv_pages = self._copier.put(self._kv_pages, pages, contents, replica)

    @property
    def contents_like(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes and dtypes of what `put_contents` takes, where the mesh has one replica."""
        [like] = self._copier.contents_like
        return like

    @property
    def page_like(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shape and dtype of one page on the devices, [L, K, S, W] of each array of the cache."""
        return tuple(map(_without_first_axis, self._copier.contents_like[0]))

    @property
    def params(self) -> Params:
        """The parameters, which no step changes."""
        return self._params

    def replace_params(self, params: Params) -> None:
        """Computes with `params` after all steps that were dispatched. They are as those before in shapes and places.

        What of them sleeps, such as drafts and adapters that stay, comes back to the devices. Before the next step
        `bring_adapters_again` has to follow.
        All devices of the mesh must be those of this process.
        """
        assert self._leader is None, "no other process has these arrays"
        self._params = restored(params)
        if self.expert_slots is not None:
            self.expert_slots.read(self._params)

    def read_params(self, directory: Path) -> None:
        """Does the same with the weights of a directory, which all processes of the mesh read. Drafts stay.

        Raises ValueError where one of them cannot. Then all go on with the weights before.
        """
        self.call(ReadWeights.of(directory))
        if self._trouble is not None:
            raise self._trouble

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the devices."""
        return not are_parked(self._params)

    @property
    def has_pages(self) -> bool:
        """Whether the devices have pages and state. While they have none, no step may be dispatched."""
        return self._kv_pages is not None

    def release_pages(self) -> None:
        """Frees pages and state after all steps that were dispatched. `reset` makes new ones."""
        self.call(ReleasePages())

    def park_weights(self) -> None:
        """Moves the weights to the host's memory, where those of CPUs are already."""
        self.call(ParkWeights())

    def unpark_weights(self) -> None:
        """Brings the weights back to the devices with the same bits, unless they are there, or were dropped."""
        self.call(UnparkWeights())

    def drop_weights(self) -> None:
        """Frees the weights, so that `replace_params` or `read_params` must bring others. Arrays that others hold stay.

        What belongs to a draft model or to adapters stays as well, because nothing replaces it.
        """
        self.call(DropWeights())

    def bring_adapter(self, slot: int, adapter: LoraAdapter, replica: int = 0) -> None:
        """Does what `PlanRunner.bring_adapter` says, for one replica of the mesh."""
        fill = AdapterFill(adapter.arrays, slot, adapter.has_magnitudes, replica)
        if self._leader is None:
            self._fill_adapter(fill)
        else:
            self.call(FillAdapter(fill.packed()))
        self._bound_to_weights.pop((replica, slot), None)
        if adapter.has_magnitudes or self.expert_slots is not None:
            self._bound_to_weights[replica, slot] = adapter

    def _fill_adapter(self, fill: AdapterFill) -> None:
        assert self._adapter_fills is not None, "there is no room for adapters"
        if self.expert_slots is not None:
            fill = replace(fill, arrays=self.expert_slots.arranged(fill.arrays))
        self._params = self._adapter_fills.fill(self._params, fill)
        if self._forwarded is not None:  # its rows have adapters that stay, and the arrays of all slots were donated
            head = self._forwarded.head | {LORA: head_of(self._params)[LORA]}
            self._forwarded = replace(self._forwarded, head=head)

    def bring_adapters_again(self) -> None:
        """Brings the adapters whose ratios, or the places of whose experts, are those of weights before."""
        for (replica, slot), adapter in [*self._bound_to_weights.items()]:
            self.bring_adapter(slot, adapter, replica)

    def empty_adapters(self) -> None:
        """Makes the slots of adapters as new, if there are any. A fill that broke off may have taken them along."""
        if self._adapter_fills is not None and self.has_weights:
            self.call(EmptyAdapters())
            self._bound_to_weights.clear()

    def place_experts(self, layer: int, wanted: NDArray[np.int32]) -> None:
        """Moves the experts of a layer after all steps that were dispatched. For `wanted` see `ExpertSlots.moved`."""
        assert self.expert_slots is not None, "experts stay where they were loaded"
        self.call(PlaceExperts(wanted, layer))

    def take_expert_loads(self) -> jax.Array:
        """Returns how many tokens have chosen each expert since the last call, u32[D * L, X], after all steps so far.

        The counts of D replicas of the mesh follow each other. It returns at once.
        """
        self.call(TakeLoads())
        assert self._loads is not None, "nothing is counted"
        self._loads.copy_to_host_async()
        return self._loads

    def memory_use(self) -> MemoryUse:
        """Returns what this runner takes of each device: nothing for weights and pages that sleep."""
        return MemoryUse(
            weights=_bytes_on_a_device(self._params),
            pages=_bytes_on_a_device(self._kv_pages),
            num_tokens=(self.shape.num_pages - 1) * self.shape.page_size,  # page 0 is the trash page
            state=_bytes_on_a_device(self._state),
            step=None if self.programs.largest is None else self.programs.largest.step_bytes,
            grows=self._pages_grow,
        )

    def close(self) -> None:
        """Stops compiling and lets go of the device's memory. Nothing may be dispatched afterwards."""
        self.call(Close())

    def make(self, call: Call) -> StepResult | None:
        """Does `call` here, and only here; a step has a result. Whatever changes the devices is one of these calls."""
        match call:
            case Admit(packed):
                self._state = self._admit(self._state, packed)
            case AdmitRare(packed):
                self._state = self._admit_rare()(self._state, packed)
            case Recall(packed):
                self._state = self._recall()(self._state, packed)
            case Recount(packed):
                self._state = self._recount()(self._state, packed)
            case FillSideRows(packed):
                self._state = self._fill_side_rows()(self._state, packed)
            case Mask(packed):
                self._state = self._store_masks()(self._state, packed)
            case ForkSlots(packed):
                self._kv_pages, self._state = self._fork()(self._kv_pages, self._state, packed)
            case Step(bucket, packed):
                program = self.programs.wait_for(bucket)
                self._kv_pages, self._state, output = program(self._params, self._kv_pages, self._state, packed)
                return StepResult(output)
            case Forward(bucket, packed):
                program = self.programs.wait_for(bucket)
                forwarded = program.started(self._params, self._kv_pages, self._state, packed)
                self._kv_pages, self._state, unsampled, readable = forwarded
                self._forwarded = Forwarded(unsampled, readable, head_of(self._params))
            case Read(bucket, packed, number):
                assert self._forwarded is not None, "nothing was forwarded"
                name = DEVICE_READOUTS[number].name
                read = self.programs.wait_for(bucket).readouts[name]()
                report = read(self._state, self._forwarded, packed)
                self._forwarded.reports.setdefault(name, []).append(report)
            case SampleRows(bucket):
                assert self._forwarded is not None, "nothing was forwarded"
                left, self._forwarded = self._forwarded, None
                program = self.programs.wait_for(bucket)
                self._state, output = program.finish(left.head, self._state, left.unsampled)
                return StepResult(output, left.reports)
            case SampleSome(bucket, turns, is_last):
                assert self._forwarded is not None, "nothing was forwarded"
                left = self._forwarded
                self._forwarded = None if is_last else replace(left, reports={})
                program = self.programs.wait_for(bucket)
                self._state, output = program.finish(left.head, self._state, left.unsampled, turns)
                return StepResult(output, left.reports)
            case TakeLoads():
                self._state, self._loads = self._take_loads(self._state)
            case PlaceExperts(wanted, layer):
                assert self.expert_slots is not None, "experts stay where they were loaded"
                self._params = self.expert_slots.moved(self._params, layer, wanted)
            case ReadWeights():
                self._trouble = self._take_weights(call.directory)
            case ReleasePages():
                self._kv_pages = self._state = self._forwarded = self._loads = None  # type: ignore[assignment]
            case ParkWeights():
                if not self._is_on_host and self.has_weights:
                    self._params = parked(self._params, keeps=True)
            case UnparkWeights():
                if not self.has_weights and not are_dropped(self._params):
                    self._params = restored(self._params)
            case DropWeights():
                others = {name: value for name, value in self._params.items() if name in (DRAFT, LORA)}
                own = {name: value for name, value in self._params.items() if name not in others}
                self._params = parked(own, keeps=False) | others
            case FillAdapter(packed):
                assert self._adapter_fills is not None, "there is no room for adapters"
                self._fill_adapter(self._adapter_fills.unpacked(packed))
            case EmptyAdapters():
                assert self._adapter_fills is not None, "there is no room for adapters"
                self._params = without_adapters(self._params)  # freed first
                self._params[LORA] = self._adapter_fills.empty()
            case Reset():
                self._kv_pages = self._state = self._forwarded = None  # type: ignore[assignment]  # freed before the new
                self._kv_pages, self._state = self._new_cache()
            case Close():
                self.programs.close()
                self._params = self._kv_pages = self._state = self._forwarded = None  # type: ignore[assignment]
        return None

    def _take_weights(self, directory: Path) -> ValueError | None:
        """Reads the weights of a directory, and takes them unless a process cannot read them. Returns why, then."""
        assert self._read_weights is not None, "one process alone replaces its weights itself"
        try:
            read = self._read_weights(directory)
        except ValueError as error:
            return error
        self._params = restored(self._params | read)  # drafts and adapters, which stay, may sleep
        if self.expert_slots is not None:
            self.expert_slots.begin()
        return None

    def call(self, call: Call) -> StepResult | None:
        """Does what `PlanRunner.call` says, and lets the processes that follow this one do the same."""
        return self.make(call) if self._leader is None else self._leader.call(self.make, call)


def _without_first_axis(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def _filled_up(array: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Returns `array`, filled up with zeros to `shape`."""
    if array.shape == shape:
        return array
    filled = np.zeros(shape, array.dtype)
    filled[: len(array)] = array
    return filled


def _bytes_on_a_device(tree: Any) -> int:
    there = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))  # and not parked
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in there)


def _of_a_device(pages: AbstractCachePages) -> AbstractCachePages:
    """Returns the shapes and dtypes that one device has of pages."""
    own: AbstractCachePages = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), pages
    )
    return own


def _new_cache(pages: AbstractCachePages, sizes: SlotSizes, pages_grow: bool) -> tuple[KVCachePages, DeviceState]:
    """Returns what one device has of the pages and the slot states of an engine without requests."""
    zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
    return (untouched if pages_grow else zeros)(pages), new_state(sizes)
