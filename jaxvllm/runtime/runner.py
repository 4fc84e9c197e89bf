"""The runner: owns everything on the device, turns plans into dispatched steps and their outputs into host values."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxvllm.core.step_plan import DraftCounts, Fork, StepOutput, StepPlan, TopLogprobs
from jaxvllm.core.step_sizes import StepSizes, step_overhead
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.batch import pack
from jaxvllm.runtime.buckets import Bucket, BucketLadder
from jaxvllm.runtime.cache_shape import CacheShape, KVCachePages
from jaxvllm.runtime.expert_loads import EXPERT_LOADS, take_loads
from jaxvllm.runtime.expert_slots import ExpertSlots
from jaxvllm.runtime.forks import FORK_BATCH, pack_forks
from jaxvllm.runtime.memory import MemoryUse
from jaxvllm.runtime.multihost.calls import (
    Admit,
    AdmitRare,
    Call,
    Close,
    FillSideRows,
    ForkSlots,
    Forward,
    Mask,
    Read,
    Recall,
    Recount,
    Reset,
    SampleRows,
    Step,
)
from jaxvllm.runtime.multihost.leader import Leader
from jaxvllm.runtime.page_copies import COPY_BATCH, PageContents, contents_like, copy_recipes, pack_pages
from jaxvllm.runtime.programs import Programs
from jaxvllm.runtime.proposers import Proposer
from jaxvllm.runtime.readouts import BY_NAME, DEVICE_READOUTS, Forwarded
from jaxvllm.runtime.recipe import Recipe
from jaxvllm.runtime.sampler import DEFAULT_OPTIONS, DeviceLogprobs, SamplerOptions
from jaxvllm.runtime.side_rows import store_side_rows
from jaxvllm.runtime.state import (
    ADMISSION_BATCH,
    RECALL_WORDS,
    DeviceState,
    admit,
    admit_rare,
    new_state,
    pack_admissions,
    pack_rare,
    pack_recalls,
    pack_recounts,
    rare_words,
    recall,
    recount,
)
from jaxvllm.runtime.step_model import DRAFT_MARK, DeviceOutput
from jaxvllm.runtime.step_program import StepCompiler
from jaxvllm.runtime.token_mask import MASK_BATCH, mask_words, pack_masks, store_masks
from jaxvllm.runtime.untouched import untouched
from pallas_kernels.backend import Backend


@partial(jax.tree_util.register_dataclass, data_fields=["output", "scores", "reports"], meta_fields=[])
@dataclass(frozen=True)
class StepResult:
    """The future results of a dispatched step: tokens, the scores of prompts, and the reports of readouts."""

    output: DeviceOutput
    scores: DeviceLogprobs | None
    reports: dict[str, list[Any]] = field(default_factory=dict)  # of each call of a readout's program, by its name


@dataclass(frozen=True)
class HeldStep:
    """A step whose forward pass was dispatched, and which samples when the host has supplied masks."""

    plan: StepPlan
    bucket: Bucket


@dataclass(frozen=True)
class InFlight:
    """A dispatched step; its output may not exist yet."""

    plan: StepPlan
    bucket: Bucket
    result: StepResult
    at: float  # when it could begin, on the host's monotonic clock

    @property
    def is_ready(self) -> bool:
        """Whether reading the tokens would not wait."""
        return bool(self.result.output.yielded.is_ready())  # type: ignore[attr-defined]  # jax hides it


class Runner:
    """Parameters, pages and slot state on the device, and the compiled steps over them."""

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
    ):
        """Allocates pages and state on `mesh` and compiles the first bucket; the others follow in the background.

        With a `leader`, the processes that follow it have devices of the mesh too, and do what this runner does. For
        `yields` see `Programs`.
        """
        self.shape = shape
        # Whether a step with drafts takes longer after steps without.
        self.proposer_catches_up = proposer is not None and proposer.cache is not None and not proposer.sees_all
        self._leader = leader
        self._params = params
        pages, state = shape.pages(spec, backend, mesh), shape.state(spec, mesh)
        self._sizes = shape.sizes(spec)
        self._side = shape.side
        # Interpreted kernels compute in NumPy, which warns where memory that was never written happens to hold NaN.
        self._overhead = step_overhead(on_cpu=mesh.devices.flat[0].platform == "cpu")
        self._pages_grow = mesh.devices.flat[0].platform == "cpu" and not backend.interpret
        self._new_pages: Callable[[], KVCachePages] = (
            (lambda: tuple(untouched(of_group, mesh) for of_group in pages))
            if self._pages_grow
            else make_program(_filling(partial(_zeros, tuple((x.shape, x.dtype) for x in pages)), pages, mesh))
        )
        self._new_state = make_program(_filling(partial(new_state, self._sizes), state, mesh))
        self._kv_pages: KVCachePages
        self._state: DeviceState
        self._forwarded: Forwarded | None = None  # of a step whose second half is held back
        self.make(Reset())

        def packed_struct(packed: NDArray[np.int32]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(packed.shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))

        def compile_update(update: Callable[..., DeviceState], packed: NDArray[np.int32]) -> Callable[..., DeviceState]:
            return make_program(Recipe(update, (state, packed_struct(packed)), mesh, donates=(0,)))

        rare = np.zeros(rare_words(self._sizes), np.int32)
        tokens = np.zeros(RECALL_WORDS, np.int32)
        # Few requests need these. So the first request of another kind does not wait for them.
        self._admit_rare = cache(lambda: compile_update(partial(admit_rare, sizes=self._sizes), rare))
        self._recall = cache(lambda: compile_update(recall, tokens))
        self._recount = cache(lambda: compile_update(recount, tokens))
        self._store_masks = cache(lambda: compile_update(store_masks, pack_masks((), self._sizes)))

        # Not the weights themselves: they must be free after `close`.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        compiler = StepCompiler(shapes, pages, spec, shape, backend, mesh, sampling, make_program, proposer)
        self._fork = cache(compiler.compile_fork)
        num_groups = len(shape.groups(spec))
        self._copies = cache(lambda: tuple(make_program(recipe) for recipe in copy_recipes(pages, num_groups, mesh)))
        self.contents_like = contents_like(pages, num_groups, mesh)
        # Experts that move, and nothing where they stay.
        slots = ExpertSlots(Spread.on(spec, mesh), params, mesh, make_program)
        self.expert_slots = slots if slots.ffns else None
        loads = shape.loads(spec)
        self.load_shape = None if loads is None else (loads.num_layers, loads.num_experts)
        if loads is not None:
            where = jax.tree.map(lambda x: x.sharding, (state, state[EXPERT_LOADS]))
            self._take_loads = make_program(Recipe(take_loads, (state,), mesh, donates=(0,), out_shardings=where))
        rarely: list[Callable[[], object]] = [
            self._admit_rare,
            self._recall,
            self._recount,
            self._store_masks,
            self._fork,
        ]
        if shape.side is not None:
            self._fill_side_rows = cache(partial(compile_update, store_side_rows, shape.side.nothing()))
            rarely.append(self._fill_side_rows)
        with ThreadPoolExecutor(1) as other:
            no_admissions = pack_admissions((), self._sizes)
            admit_later = other.submit(compile_update, partial(admit, sizes=self._sizes), no_admissions)
            afterwards = (*rarely, compiler.compile_readouts)
            self.programs = Programs(ladder, compiler.compile, yields, afterwards)
            self._admit = admit_later.result()

    @property
    def step_sizes(self) -> StepSizes:
        """The sizes of the steps with prompts that are compiled so far."""
        return StepSizes(self.programs.mixed_sizes, self._overhead)

    def reset(self) -> None:
        """Makes pages and state as new. A step that broke off may have taken (donated) the old ones along."""
        self._call(Reset())

    def dispatch(self, plan: StepPlan) -> InFlight | HeldStep:
        """Starts the step and returns at once: the next may be dispatched before this one's output is read.

        A plan with masked rows is held after its forward pass: `supply` starts the other half.
        """
        for admissions in batched(plan.admissions, ADMISSION_BATCH):
            self._call(Admit(pack_admissions(admissions, self._sizes)))
            for admission in admissions:
                if (rare := pack_rare(admission, self._sizes)) is not None:
                    self._call(AdmitRare(rare))
                for packed in pack_recalls(admission):
                    self._call(Recall(packed))
                for packed in pack_recounts(admission):
                    self._call(Recount(packed))
                for filled in admission.side_rows:
                    assert self._side is not None, "there is no side store"
                    for packed in self._side.pack(filled):
                        self._call(FillSideRows(packed))
        bucket = self.programs.choose(plan)
        packed = pack(plan, bucket, self._sizes)
        if not plan.is_split:
            return self._in_flight(plan, bucket, self._call(Step(bucket, packed)))
        self._call(Forward(bucket, packed))
        return HeldStep(plan, bucket) if plan.is_masked else self._sample(plan, bucket)

    @property
    def mask_words(self) -> int:
        """Words of the mask of a row."""
        return mask_words(self._sizes.vocab_size)

    def supply(self, held: HeldStep, masks: Iterable[tuple[int, NDArray[np.int32]]]) -> InFlight:
        """Starts the half of the step that was held back, which samples under the masks of these slots."""
        for rows in batched(masks, MASK_BATCH):
            self._call(Mask(pack_masks(rows, self._sizes)))
        return self._sample(held.plan, held.bucket)

    def _sample(self, plan: StepPlan, bucket: Bucket) -> InFlight:
        """Starts the second half of a step, and what must come before it."""
        for number, readout in enumerate(DEVICE_READOUTS):
            if readout.name in plan.readouts:
                for words in readout.calls(plan, bucket):
                    self._call(Read(bucket, words, number))
        return self._in_flight(plan, bucket, self._call(SampleRows(bucket)))

    def fork(self, forks: Iterable[Fork]) -> None:
        """Does `forks` after all steps that were dispatched. Several of one beam search have distinct slots."""
        for some in batched(forks, FORK_BATCH):
            self._call(ForkSlots(pack_forks(some, self._sizes)))

    def _in_flight(self, plan: StepPlan, bucket: Bucket, result: StepResult | None) -> InFlight:
        assert result is not None
        result.output.yielded.copy_to_host_async()
        return InFlight(plan, bucket, result, time.monotonic())

    def collect(self, step: InFlight) -> StepOutput:
        """Waits for the output of `step` and brings it to the host; log-probabilities only when a row wants them."""
        plan, result = step.plan, step.result
        yielded = np.asarray(result.output.yielded)[: plan.num_rows]
        tokens, drafts, were_drafts = yielded[:, 1 : 1 + plan.row_tokens], None, None
        if plan.num_drafts:
            drafted, accepted = np.split(yielded[:, 1 + step.bucket.row_tokens :], 2, axis=1)
            drafts = DraftCounts(drafted, accepted)
            tokens, were_drafts = tokens % DRAFT_MARK, tokens >= DRAFT_MARK
        return StepOutput(
            tokens,
            yielded[:, 0],
            _by_row(result.output.logprobs, plan) if plan.wants_logprobs else None,
            _on_host(result.scores, plan.num_tokens) if plan.scores_prompts else None,
            {name: BY_NAME[name].report(plan, parts) for name, parts in result.reports.items()},
            drafts,
            were_drafts,
        )

    def read_pages(self, pages: np.ndarray, group: int = 0) -> np.ndarray:
        """Returns the KV of a group's `pages` on the host, to look at: f[layers of the group, len(pages), ...]."""
        if not self._kv_pages[group].is_fully_addressable:
            raise NotImplementedError("pages on devices of several processes cannot be read by one: use one process")
        return np.asarray(self._kv_pages[group][:, pages])

    def take_pages(self, pages: Sequence[NDArray[np.int32]]) -> list[PageContents]:
        """Copies pages, i32[N] of each group, after all steps that were dispatched, and returns at once.

        Each entry has the next `COPY_BATCH` of them; what is after the last one means nothing.
        """
        take, _ = self._copies()
        return [take(self._kv_pages, packed) for packed in pack_pages(pages, self._sizes.num_groups)]

    def put_pages(self, pages: Sequence[NDArray[np.int32]], contents: Sequence[NDArray[np.generic]]) -> None:
        """Fills pages, i32[N] of each group, after all steps that were dispatched, and returns at once.

        `contents` are [N, L, K, S, W], of each array of the cache.
        """
        for first in range(0, len(pages[0]), COPY_BATCH):
            some = slice(first, first + COPY_BATCH)
            arrays = zip((array[some] for array in contents), self.contents_like, strict=True)
            on_device = tuple(jax.device_put(_filled_up(array, like.shape), like.sharding) for array, like in arrays)
            self.put_contents([of_group[some] for of_group in pages], on_device)

    def put_contents(self, pages: Sequence[NDArray[np.int32]], contents: PageContents) -> None:
        """Fills at most `COPY_BATCH` pages with what is on the devices already, and returns at once."""
        _, put = self._copies()
        [packed] = pack_pages(pages, self._sizes.num_groups)
        self._kv_pages = put(self._kv_pages, packed, contents)

    @property
    def page_like(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shape and dtype of one page on the devices, [L, K, S, W] of each array of the cache."""
        return tuple(map(_without_first_axis, self.contents_like))

    @property
    def params(self) -> Params:
        """The parameters, which no step changes."""
        return self._params

    def replace_params(self, params: Params) -> None:
        """Computes with `params` after all steps that were dispatched. They are as those before in shapes and places.

        Raises NotImplementedError where other processes have devices of the mesh.
        """
        if self._leader is not None:
            raise NotImplementedError("weights on devices of several processes cannot be replaced: use one process")
        self._params = params
        if self.expert_slots is not None:
            self.expert_slots.read(params)

    def place_experts(self, layer: int, wanted: NDArray[np.int32]) -> None:
        """Moves the experts of a layer after all steps that were dispatched. For `wanted` see `ExpertSlots.moved`."""
        assert self.expert_slots is not None, "experts stay where they were loaded"
        self._params = self.expert_slots.moved(self._params, layer, wanted)

    def take_expert_loads(self) -> jax.Array:
        """Returns how many tokens have chosen each expert since the last call, u32[L, X], after all steps so far.

        It returns at once.
        """
        self._state, loads = self._take_loads(self._state)
        loads.copy_to_host_async()
        return loads

    def memory_use(self) -> MemoryUse:
        """Returns what this runner takes of each device."""
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
        self._call(Close())

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
                self._kv_pages, self._state, output, scores = program(self._params, self._kv_pages, self._state, packed)
                return StepResult(output, None if scores is None else scores.best)
            case Forward(bucket, packed):
                begin = self.programs.wait_for(bucket).begin
                self._kv_pages, self._state, *held = begin(self._params, self._kv_pages, self._state, packed)
                self._forwarded = Forwarded(*held)
            case Read(bucket, packed, number):
                assert self._forwarded is not None, "nothing was forwarded"
                name = DEVICE_READOUTS[number].name
                read = self.programs.wait_for(bucket).readouts[name]()
                report = read(self._params, self._state, self._forwarded, packed)
                self._forwarded.reports.setdefault(name, []).append(report)
            case SampleRows(bucket):
                assert self._forwarded is not None, "nothing was forwarded"
                left, self._forwarded = self._forwarded, None
                program = self.programs.wait_for(bucket)
                self._state, output = program.finish(self._params, self._state, left.unsampled)
                return StepResult(output, left.scores.best, left.reports)
            case Reset():
                self._kv_pages = self._state = self._forwarded = None  # type: ignore[assignment]  # freed before the new
                self._kv_pages = self._new_pages()
                self._state = self._new_state()
            case Close():
                self.programs.close()
                self._params = self._kv_pages = self._state = self._forwarded = None  # type: ignore[assignment]
        return None

    def _call(self, call: Call) -> StepResult | None:
        return self.make(call) if self._leader is None else self._leader.call(self.make, call)


def _by_row(logprobs: DeviceLogprobs, plan: StepPlan) -> TopLogprobs:
    """Returns the log-probabilities of [Y, R] tokens on the host: number `r * Y + y` is token y of row r."""

    def flat(x: jax.Array) -> np.ndarray:
        values = np.swapaxes(np.asarray(x), 0, 1)[: plan.num_rows, : plan.row_tokens]
        return values.reshape(-1, *values.shape[2:])

    return TopLogprobs(*(flat(x) for x in (logprobs.token, logprobs.ranks, logprobs.top_ids, logprobs.top)))


def _on_host(logprobs: DeviceLogprobs | None, count: int) -> TopLogprobs:
    """Copies the first `count` to the host."""
    assert logprobs is not None, "a decode bucket has no prompts"
    device = jax.tree.map(lambda x: np.asarray(x)[:count], logprobs)
    return TopLogprobs(device.token, device.ranks, device.top_ids, device.top)


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
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _filling(make: Callable[[], Any], like: Any, mesh: Mesh) -> Recipe:
    """Returns the recipe of `make`, whose arrays come up where those of `like` are: nothing is sent."""
    return Recipe(make, (), mesh, out_shardings=jax.tree.map(lambda x: x.sharding, like))


def _zeros(structs: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> KVCachePages:
    return tuple(jnp.zeros(shape, dtype) for shape, dtype in structs)
