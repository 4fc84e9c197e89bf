"""Step programs: the step of a bucket, compiled ahead of time for the devices of a mesh."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxvllm.core.readout import DISTRIBUTIONS, SCORES, WIDE_SCORES
from jaxvllm.core.step_sizes import step_overhead
from jaxvllm.models.lora import without_adapters
from jaxvllm.models.params import Params, activation_dtype, head_of
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.batch import packed_size
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape, KVCachePages
from jaxvllm.runtime.decoding import decode
from jaxvllm.runtime.expert_choices import ChoiceShape
from jaxvllm.runtime.forks import fork_slots, pack_forks
from jaxvllm.runtime.memory import step_bytes
from jaxvllm.runtime.pipeline import Pipeline
from jaxvllm.runtime.proposers import Proposer
from jaxvllm.runtime.readouts import BY_NAME, DEVICE_READOUTS, DeviceReadout, ReadProgram
from jaxvllm.runtime.readouts.readout import Readable, Unsampled
from jaxvllm.runtime.recipe import Recipe
from jaxvllm.runtime.sampler import DEFAULT_OPTIONS, SamplerOptions
from jaxvllm.runtime.slot_fields import DeviceState
from jaxvllm.runtime.step import forward, sample_in_turn, sample_rows
from jaxvllm.runtime.step_model import DeviceOutput, StepModel
from pallas_kernels.backend import REFERENCE, Backend
from sharding.axis import ModelAxis, ReplicaAxis, StageAxis
from sharding.placement import EVERYWHERE, OF_REPLICAS, of_replicas, spans_processes
from sharding.rules import DATA, MODEL, STAGE

# For a program that touches no page.
_NO_PAGES = CacheShape(1, 1, 1, 1, jnp.dtype(jnp.float32), 1)


@dataclass(frozen=True)
class StepProgram:
    """The compiled step of a bucket: one program for decode rows, and two where prompts are computed.

    `begin` is `decoding.decode`, which does all, or `step.forward`, to be followed by `sample`. It gets the arrays of
    adapters only where `is_adapted`.
    """

    begin: jax.stages.Compiled
    sample: jax.stages.Compiled | None = None
    readouts: Mapping[str, Callable[[], ReadProgram]] = field(default_factory=dict)  # each compiled at its first call
    read_bytes: int = 0  # that the largest program of an expected readout needs beyond its arguments
    is_adapted: bool = False

    @property
    def parts(self) -> tuple[jax.stages.Compiled, ...]:
        """The programs in the order in which they run, without those of readouts."""
        return (self.begin,) if self.sample is None else (self.begin, self.sample)

    @property
    def step_bytes(self) -> int:
        """Bytes that a call needs beyond its arguments, as XLA reports them."""
        return max(self.read_bytes, *map(step_bytes, self.parts))

    def __call__(
        self, params: Params, kv_pages: KVCachePages, state: DeviceState, packed: Any
    ) -> tuple[KVCachePages, DeviceState, DeviceOutput]:
        """Dispatches the whole step, of which no row wants a readout. Donates `kv_pages` and `state`."""
        kv_pages, state, *left = self.started(params, kv_pages, state, packed)
        return kv_pages, *((state, *left) if self.sample is None else self.finish(head_of(params), state, left[0]))

    def started(self, params: Params, kv_pages: KVCachePages, state: DeviceState, packed: Any) -> tuple[Any, ...]:
        """Dispatches `begin`, and returns what it does. Donates `kv_pages` and `state`."""
        given = params if self.is_adapted else without_adapters(params)
        results: tuple[Any, ...] = self.begin(given, kv_pages, state, packed)
        return results

    def finish(
        self, head: Params, state: DeviceState, unsampled: Unsampled, *turns: Any
    ) -> tuple[DeviceState, DeviceOutput]:
        """Dispatches the second half, with what `head_of` returns. Donates `state`.

        `turns` i32[D], of several replicas: 1 for those that sample.
        """
        assert self.sample is not None, "a decode bucket samples in the same program"
        result: tuple[DeviceState, DeviceOutput] = self.sample(head, state, unsampled, *turns)
        return result


@dataclass(frozen=True)
class StepCompiler:
    """Compiles the steps of one model over one KV cache; `params` and `kv` may be arrays or their abstract shapes.

    `make` makes a program of its recipe. Where several processes have the devices of several replicas, a result that
    the host reads is an `EachReplica`, because the process that plans all of them has not all of these devices.
    """

    params: Params
    kv: Any
    spec: ModelSpec
    shape: CacheShape
    backend: Backend
    mesh: Mesh
    sampling: SamplerOptions = DEFAULT_OPTIONS
    make: Callable[[Recipe], jax.stages.Compiled] = Recipe.compile
    proposer: Proposer | None = None
    _samplers: dict[tuple[int, bool], jax.stages.Compiled] = field(default_factory=dict)  # by rows, and whether plain
    _forwards: dict[Bucket, jax.stages.Compiled] = field(default_factory=dict)  # of buckets that have a plain twin
    # By the name of the readout, and the sizes of the bucket on which it depends.
    _readers: dict[tuple[str, tuple[int, ...]], Callable[[], ReadProgram]] = field(default_factory=dict)
    _shared: dict[tuple[str, int], jax.stages.Compiled] = field(default_factory=dict)

    def compile(self, bucket: Bucket) -> StepProgram:
        """Compiles the step of `bucket`. Sampling depends only on the number of rows, and is compiled once for each."""
        if bucket.is_decode:
            return StepProgram(self.compile_begin(bucket), is_adapted=bucket.is_adapted)
        # Both at once: compilers run outside of Python's lock. A cold start took 4.2 s and not 4.6 (2 cores).
        with ThreadPoolExecutor(1) as other:
            begin_later = other.submit(self._forward, bucket)
            kind = bucket.num_rows, bucket.is_plain
            if kind not in self._samplers:
                self._samplers[kind] = self.compile_sampler(*kind)
            begin, sample = begin_later.result(), self._samplers[kind]
        if bucket.is_plain:
            return StepProgram(begin, sample, is_adapted=bucket.is_adapted)
        readouts = {one.name: self._reader(one, bucket) for one in DEVICE_READOUTS if one.is_possible(self.sampling)}
        if bucket.is_split:  # a row has asked for it that may want distributions in the step at hand
            readouts[DISTRIBUTIONS.name]()
        for readout in (SCORES, WIDE_SCORES):  # they may need more memory than the step
            if readout.name in readouts:
                readouts[readout.name]()
        read_bytes = max(map(step_bytes, self._shared.values()))
        return StepProgram(begin, sample, readouts, read_bytes, bucket.is_adapted)

    def _forward(self, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles `StepProgram.begin` of a bucket for prompts, or takes that of its plain twin, which is the same."""
        whole = replace(bucket, is_plain=False)
        begin = self._forwards.get(whole)
        if begin is None:
            begin = self.compile_begin(whole)
        if bucket.is_plain:
            self._forwards[whole] = begin
        return begin

    def _reader(self, readout: DeviceReadout, bucket: Bucket) -> Callable[[], ReadProgram]:
        """Returns what compiles the program of a readout when it is called first."""
        key = readout.name, readout.sizes(bucket)
        if key not in self._readers:
            self._readers[key] = cache(partial(readout.compile, self, bucket))
        return self._readers[key]

    def compile_begin(self, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles `StepProgram.begin` of `bucket`."""
        run = partial(decode if bucket.is_decode else forward, bucket=bucket)
        if self.proposer is not None and (bucket.num_drafts or self._is_seen(bucket)):
            run = partial(run, proposer=self.proposer)
        packed = self.of_replicas((packed_size(bucket, self.shape.sizes(self.spec)),), jnp.int32)
        params = self.params if bucket.is_adapted else without_adapters(self.params)
        arguments = (params, self.kv, self.state, packed)
        stays: Any = OF_REPLICAS
        read: Any = self._read_by_host
        outputs = (read,) if bucket.is_decode else (stays, Readable(hidden=stays, choices=stays))
        pages = jax.tree.map(lambda x: x.sharding.spec, self.kv)
        return self._make(run, arguments, (pages, stays, *outputs), donates=(1, 2), is_adapted=bucket.is_adapted)

    def _is_seen(self, bucket: Bucket) -> bool:
        """Returns whether the proposer sees the steps of a bucket without drafts."""
        if bucket.is_blind or self.proposer is None or self.proposer.cache is None:
            return False
        return self.proposer.sees_all or not bucket.is_decode

    def compile_sampler(self, num_rows: int, is_plain: bool = False) -> jax.stages.Compiled:
        """Compiles `StepProgram.sample` for every bucket that has `num_rows` and computes prompts, plain or not."""
        arguments = (head_of(self.params), self.state, self.unsampled(num_rows))
        run: Callable[..., Any] = sample_rows
        turn: tuple[Any, ...] = ()
        if self.mesh.shape[DATA] > 1:
            run, turn = sample_in_turn, (self.of_replicas((1,), jnp.int32),)
        # It touches no page and attends to nothing. So engines with other pages or attention find it compiled. Only how
        # many rows are sampled at once depends on whether the device is a TPU.
        of_all = replace(
            self,
            shape=_NO_PAGES,
            backend=self.backend if self.backend.kind == "tpu" else REFERENCE,
            sampling=replace(self.sampling, is_plain=is_plain),
        )
        return of_all._make(run, (*arguments, *turn), (OF_REPLICAS, self._read_by_host), donates=(1,))

    def compile_readouts(self) -> None:
        """Compiles the programs of readouts that requests are expected to want, for every bucket that was compiled."""
        for (name, _), compile_it in list(self._readers.items()):
            if BY_NAME[name].is_expected(self.sampling):
                compile_it()

    def compile_fork(self) -> jax.stages.Compiled:
        """Compiles `forks.fork_slots`, which only beam search needs. It donates pages and state."""
        sizes = self.shape.sizes(self.spec)
        packed = pack_forks((), sizes)
        arguments = (self.kv, self.state, self.of_replicas(packed.shape, packed.dtype))
        return self.make(Recipe.changing(partial(fork_slots, sizes=sizes), arguments, self.mesh, count=2))

    def compile_recipe(
        self, run: Callable[..., Any], arguments: tuple[Any, ...], is_read: bool = False
    ) -> jax.stages.Compiled:
        """Compiles `run`, which needs no model. `is_read`: whether the host reads the result."""
        if self.mesh.shape[DATA] == 1:
            return self.make(Recipe(run, arguments, self.mesh))
        return self._make_recipe(run, arguments, self._read_by_host if is_read else OF_REPLICAS)

    def compile_shared(
        self, key: tuple[str, int], run: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> jax.stages.Compiled:
        """Compiles `run`, which needs the model, once for all buckets with the same `key`: a name and a size.

        The host reads the result.
        """
        if key not in self._shared:
            self._shared[key] = self._make(run, arguments, self._read_by_host, donates=())
        return self._shared[key]

    def unsampled(self, num_rows: int) -> Unsampled:
        """Returns the shapes of what a forward pass leaves of so many rows."""
        numbers = self.of_replicas((num_rows,), jnp.int32)
        return Unsampled(self.hidden(num_rows), numbers, numbers)

    @property
    def hidden_size(self) -> int:
        """The size of a hidden state, with which what the LM head reads begins."""
        return self.spec.hidden_size

    def hidden(self, count: int) -> Any:
        """Returns the shape of what the LM head reads of so many tokens."""
        return self.of_replicas((count, self.spec.head_inputs), activation_dtype(self.params))

    def choices(self, count: int) -> Any:
        """Returns the shape of the experts that so many tokens have chosen."""
        told = ChoiceShape.of(self.spec)
        return self.of_replicas((count, *told.of_token), told.dtype)

    def _make(
        self,
        run: Callable[..., Any],
        arguments: tuple[Any, ...],
        out_specs: Any,
        donates: tuple[int, ...],
        is_adapted: bool = False,
    ) -> jax.stages.Compiled:
        axis, stages = ModelAxis(self.mesh.shape[MODEL]), StageAxis(self.mesh.shape[STAGE])
        replicas = ReplicaAxis(self.mesh.shape[DATA])
        overhead = step_overhead(on_cpu=self.mesh.devices.flat[0].platform == "cpu")
        pipeline = Pipeline.of(self.spec, stages, overhead, self.shape.page_size)
        shape = self.shape.of_programs(self.spec)
        model = StepModel(self.spec, shape, self.backend, axis, replicas, self.sampling, pipeline, is_adapted)
        return self._make_recipe(partial(run, model=model), arguments, out_specs, donates)

    def _make_recipe(
        self, run: Callable[..., Any], arguments: tuple[Any, ...], out_specs: Any, donates: tuple[int, ...] = ()
    ) -> jax.stages.Compiled:
        if self._read_by_host == EVERYWHERE:
            run = partial(run_for_all, run=run, specs=out_specs, replicas=ReplicaAxis(self.mesh.shape[DATA]))
        on_parts = out_specs if self.mesh.size > 1 else None
        return self.make(Recipe(run, arguments, self.mesh, donates, on_parts))

    @property
    def _read_by_host(self) -> PartitionSpec:
        """The devices on which results are that the host reads."""
        return EVERYWHERE if self.mesh.shape[DATA] > 1 and spans_processes(self.mesh) else OF_REPLICAS

    @property
    def state(self) -> DeviceState:
        """The shapes of the slots' state."""
        return self.shape.state(self.spec, self.mesh)

    def of_replicas(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array of which each replica has a part of this shape, which all of its devices have whole."""
        return of_replicas(self.mesh, shape, dtype)


def run_for_all(*arguments: Any, run: Callable[..., Any], specs: Any, replicas: ReplicaAxis) -> Any:
    """Returns what `run` does, but an `EachReplica` in place of each result whose spec is EVERYWHERE."""
    results = run(*arguments)
    return jax.tree.map(lambda spec, own: replicas.each(own) if spec == EVERYWHERE else own, specs, results)
