"""The runner: owns everything on the device, turns plans into dispatched steps and their outputs into host values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.core.plan import StepOutput, StepPlan, TopLogprobs
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.batch import pack, packed_size
from jaxvllm.runtime.buckets import Bucket, BucketLadder
from jaxvllm.runtime.calls import Admit, Call, Close, Reset, Step
from jaxvllm.runtime.leader import Leader
from jaxvllm.runtime.memory import MemoryUse, step_bytes
from jaxvllm.runtime.programs import Compiled, Programs
from jaxvllm.runtime.sampler import DeviceLogprobs
from jaxvllm.runtime.state import ADMISSION_BATCH, DeviceState, admit, pack_admissions
from jaxvllm.runtime.step import DeviceOutput, step
from jaxvllm.runtime.untouched import untouched
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import KVPages, kv_pages_struct
from sharding.axis import ModelAxis
from sharding.placement import place

# The logical axes of the page pool, [L, P, K, S, 2 D].
PAGE_AXES = ("layers", None, "kv_heads", None, None)

COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # For v7x XLA:TPU wants 16-bit weights tiled (16, 128), is given them tiled (8, 128), as everywhere else, and copies
    # all of them in every step: 3.3 GiB for two layers of Llama 3 70B (compiled HLO, libtpu 0.0.48.1).
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False},
    # XLA:GPU's Triton matmuls copy the layer's slice of a stacked weight first, three times decode's memory traffic;
    # cuBLASLt reads it in place (compiled HLO, jax 0.11.2).
    "gpu": {"xla_gpu_enable_triton_gemm": False},
    # LLVM at -O1: a mixed bucket of an 8-layer model compiles in 3.2 s and not 5.7 s, and steps take the same time
    # (1, 16 and 128 tokens, 2 cores): the matmuls are library calls, the rest is bound by memory.
    "cpu": {"xla_backend_optimization_level": 1},
}


@dataclass(frozen=True)
class CacheShape:
    """How large the page pool and the slot table are."""

    num_pages: int
    page_size: int
    num_slots: int
    max_pages: int  # of one slot
    dtype: jnp.dtype  # of keys and values

    def pages(self, spec: ModelSpec, backend: Backend, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """The page pool of a model spread over `mesh`, as `backend` lays it out."""
        heads = Spread(spec, mesh.size).whole.num_kv_heads
        struct = kv_pages_struct(
            spec.num_layers, self.num_pages, self.page_size, heads, spec.head_size, self.dtype, backend
        )
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=place(mesh)(PAGE_AXES))

    def state(self, mesh: Mesh) -> DeviceState:
        """The abstract state, which every device of `mesh` has whole."""
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.eval_shape(partial(DeviceState.create, self.num_slots, self.max_pages))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state)


@dataclass(frozen=True)
class InFlight:
    """A dispatched step; its output may not exist yet."""

    plan: StepPlan
    bucket: Bucket
    output: DeviceOutput


def compile_step(
    params: Params, kv: Any, spec: ModelSpec, shape: CacheShape, bucket: Bucket, backend: Backend, mesh: Mesh
) -> jax.stages.Compiled:
    """The step of `bucket` for the devices of `mesh`, compiled ahead of time, with the kernels of `backend`.

    `params` and `kv` may be arrays or their abstract shapes, spread over `mesh`.
    """
    axis = ModelAxis(mesh.size)
    run = partial(step, spec=spec, bucket=bucket, page_size=shape.page_size, backend=backend, axis=axis)
    everywhere = PartitionSpec()
    if axis.size > 1:
        pages = kv.sharding.spec
        shares = jax.tree.map(lambda x: x.sharding.spec, params)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(shares, pages, everywhere, everywhere),
            out_specs=(pages, everywhere, everywhere),
            check_vma=False,  # Pallas calls do not say over which axes their outputs vary
        )
    packed = jax.ShapeDtypeStruct((packed_size(bucket),), jnp.int32, sharding=NamedSharding(mesh, everywhere))
    program = jax.jit(run, donate_argnums=(1, 2))
    # Mosaic GPU asks the context for its device when there is none: see pallas_kernels/deviceless.py.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = program.lower(params, kv, shape.state(mesh), packed)
    return lowered.compile(COMPILER_OPTIONS.get(mesh.devices.flat[0].platform))


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
    ):
        """Allocates pages and state on `mesh` and compiles the largest bucket; the others follow in the background.

        With a `leader`, the processes that follow it have devices of the mesh too, and do what this runner does. For
        `yields` see `Programs`.
        """
        self.shape = shape
        self._leader = leader
        self._params = params
        pages, state = shape.pages(spec, backend, mesh), shape.state(mesh)
        # Interpreted kernels compute in NumPy, which warns where memory that was never written happens to hold NaN.
        self._pages_grow = mesh.devices.flat[0].platform == "cpu" and not backend.interpret
        self._new_pages: Callable[[], KVPages] = (
            partial(untouched, pages, mesh)
            if self._pages_grow
            else _maker(partial(jnp.zeros, pages.shape, pages.dtype), pages)
        )
        self._new_state = _maker(partial(DeviceState.create, shape.num_slots, shape.max_pages), state)
        self._kv_pages: KVPages
        self._state: DeviceState
        self.make(Reset())
        admissions = jax.ShapeDtypeStruct(
            pack_admissions((), shape.num_slots, shape.max_pages).shape, jnp.int32, sharding=state.last_token.sharding
        )
        self._admit: Compiled = jax.jit(admit, donate_argnums=0).lower(state, admissions).compile()
        # Not the weights themselves: they must be free after `close`.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        self.programs = Programs(
            ladder, lambda bucket: compile_step(shapes, pages, spec, shape, bucket, backend, mesh), yields
        )

    def reset(self) -> None:
        """Makes pages and state as new. A step that broke off may have taken (donated) the old ones along."""
        self._call(Reset())

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Starts the step and returns at once: the next may be dispatched before this one's output is read."""
        for admissions in batched(plan.admissions, ADMISSION_BATCH):
            self._call(Admit(pack_admissions(admissions, self.shape.num_slots, self.shape.max_pages)))
        bucket = self.programs.choose(plan)
        output = self._call(Step(bucket, pack(plan, bucket, trash_slot=self.shape.num_slots)))
        assert output is not None
        output.token_ids.copy_to_host_async()
        return InFlight(plan, bucket, output)

    def collect(self, step: InFlight) -> StepOutput:
        """Waits for the output of `step` and brings it to the host; log-probabilities only when a row wants them."""
        plan, output = step.plan, step.output
        return StepOutput(
            np.asarray(output.token_ids)[: plan.num_rows],
            _on_host(output.logprobs, plan.num_rows) if plan.wants_logprobs else None,
            _on_host(output.scores, plan.num_tokens) if plan.scores_prompts else None,
        )

    def read_pages(self, pages: np.ndarray) -> np.ndarray:
        """The KV of `pages` on the host, for those who want to look: f[L, len(pages), ...], layout of the backend."""
        if not self._kv_pages.is_fully_addressable:
            raise NotImplementedError("pages on devices of several processes cannot be read by one: use one process")
        return np.asarray(self._kv_pages[:, pages])

    def memory_use(self) -> MemoryUse:
        """Returns what this runner takes of each device."""
        largest = self.programs.largest
        assert isinstance(largest, jax.stages.Compiled)
        return MemoryUse(
            weights=_bytes_on_a_device(self._params),
            pages=_bytes_on_a_device(self._kv_pages),
            num_tokens=(self.shape.num_pages - 1) * self.shape.page_size,  # page 0 is the trash page
            state=_bytes_on_a_device(self._state),
            step=step_bytes(largest),
            grows=self._pages_grow,
        )

    def close(self) -> None:
        """Stops compiling and lets go of the device's memory. Nothing may be dispatched afterwards."""
        self._call(Close())

    def make(self, call: Call) -> DeviceOutput | None:
        """Does `call` here, and only here; a step has an output. Whatever changes the devices is one of these calls."""
        match call:
            case Admit(packed):
                self._state = self._admit(self._state, packed)
            case Step(bucket, packed):
                program = self.programs.wait_for(bucket)
                self._kv_pages, self._state, output = program(self._params, self._kv_pages, self._state, packed)
                return output
            case Reset():
                self._kv_pages = self._state = None  # type: ignore[assignment]  # freed before there are new ones
                self._kv_pages = self._new_pages()
                self._state = self._new_state()
            case Close():
                self.programs.close()
                self._params = self._kv_pages = self._state = None  # type: ignore[assignment]
        return None

    def _call(self, call: Call) -> DeviceOutput | None:
        return self.make(call) if self._leader is None else self._leader.call(self.make, call)


def _on_host(logprobs: DeviceLogprobs | None, count: int) -> TopLogprobs:
    """Copies the first `count` rows to the host."""
    assert logprobs is not None, "a decode bucket has no prompts"
    device = jax.tree.map(lambda x: np.asarray(x)[:count], logprobs)
    return TopLogprobs(device.token, device.ranks, device.top_ids, device.top)


def _bytes_on_a_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _maker(make: Callable[[], Any], like: Any) -> Compiled:
    """`make`, whose arrays come up where those of `like` are: nothing is sent."""
    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, like))
