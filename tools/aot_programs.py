"""The programs that every chip must compile: attention on each realistic batch, and the engine's step around it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.models.families import model_spec
from jaxvllm.models.params import abstract_params
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.runner import CacheShape, compile_step
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import Chip
from pallas_kernels.ragged_paged_attention import (
    NO_WINDOW,
    RaggedRows,
    kv_pages_struct,
    plan_rows,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.cases import CASES, SERVING, RaggedCase
from sharding.mesh import MeshShape
from tools.aot_outcome import Kind

DTYPE = jnp.dtype(jnp.bfloat16)
LAYERS = 2
# Nothing is allocated, and no row looks up a page: a pool large enough that a copy of it cannot hide among other
# temporaries, and small enough for every chip.
POOL_BYTES = 2**30

# A layer of Llama 3 70B. Every matrix is larger than XLA:GPU's 32 MiB of cuBLASLt workspace and a small step's
# activations together, so temporaries below the smallest mean that none was copied.
STEP_SPEC = model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
    }
)
SMALLEST_MATRIX_BYTES = STEP_SPEC.hidden_size * STEP_SPEC.num_heads * STEP_SPEC.head_size * DTYPE.itemsize
STEP_BUCKETS = {"decode": Bucket(8, 8), "mixed": Bucket(256, 8)}
# With kernels, the step is compiled where there are any; with the reference, on old GPUs and once on either kind.
REFERENCE_STEP_CHIPS = ("a100", "l4", "h200", "v5e")
# Spread over more devices, a weight's share is no longer larger than a workspace beside it.
STEP_MESHES = (MeshShape(1, 1), MeshShape(1, 2))


@dataclass(frozen=True)
class Program:
    """Compiles for a mesh; each device must update `pages_bytes` in place and need less than `temp_bytes` beside."""

    name: str
    mesh: MeshShape
    pages_bytes: int
    temp_bytes: int
    compile: Callable[[Mesh], jax.stages.Compiled]


def programs(chip: Chip, kind: Kind) -> tuple[Program, ...]:
    """All of one kind that `chip` must compile."""
    backend = Backend.of_chip(chip)
    if kind == "attention":
        return tuple(_attention_program(case, backend) for case in (*CASES, *SERVING))
    backends = {backend, REFERENCE} if chip.name in REFERENCE_STEP_CHIPS else {backend}
    return tuple(
        _step_program(form, bucket, backend, mesh)
        for backend in sorted(backends, key=lambda backend: backend.kind)
        for form, bucket in STEP_BUCKETS.items()
        for mesh in STEP_MESHES
    )


def _attention_program(case: RaggedCase, backend: Backend) -> Program:
    dtype = jnp.dtype(case.kv_dtype or DTYPE)

    def pool(num_pages: int) -> jax.ShapeDtypeStruct:
        return kv_pages_struct(LAYERS, num_pages, case.page_size, case.num_kv_heads, case.head_size, dtype, backend)

    pages = pool(POOL_BYTES // _num_bytes(pool(1)))

    def compile_for(mesh: Mesh) -> jax.stages.Compiled:
        return _compile_attention(case, pages, backend, mesh)

    # A copy of one layer's pages is half the pool; 8192 tokens of 64 heads are an eighth of it, in float32 a quarter.
    name, size = f"attention/{case.name}/{backend.kind}", _num_bytes(pages)
    return Program(name, MeshShape(1, 1), size, size // LAYERS, compile_for)


def _compile_attention(
    case: RaggedCase, pages: jax.ShapeDtypeStruct, backend: Backend, mesh: Mesh
) -> jax.stages.Compiled:
    """A scan over layers as the decoder's, each attending with what the one before it yielded."""
    T, R, H, K, D = case.num_tokens, len(case.rows), case.num_heads, case.num_kv_heads, case.head_size

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_pages: jax.Array,
        page_table: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        sinks: jax.Array | None,
        kv_scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        rows = RaggedRows.build(page_table, starts, lengths, T)
        plan = plan_rows(rows, kv_pages, num_heads=H, dtype=DTYPE, backend=backend)

        def layer(carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
            # Models with windows have them on some layers only, so a window is a scalar on the device.
            (q, kv_pages), (number, window) = carry, xs
            return ragged_paged_attention(
                q,
                k,
                v,
                kv_pages,
                number,
                rows,
                scale=case.scale,
                soft_cap=case.soft_cap,
                window=NO_WINDOW if case.window == NO_WINDOW else window,
                sinks=sinks,
                kv_scales=kv_scales,
                plan=plan,
                backend=backend,
            ), None

        layers = jnp.arange(LAYERS, dtype=jnp.int32), jnp.full(LAYERS, case.window, jnp.int32)
        return jax.lax.scan(layer, (q, kv_pages), layers)[0]

    def on_device(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    i32, f32 = jnp.dtype(jnp.int32), jnp.dtype(jnp.float32)
    lowered = jax.jit(attend, donate_argnums=3).lower(
        on_device((T, H, D), DTYPE),
        on_device((T, K, D), DTYPE),
        on_device((T, K, D), DTYPE),
        on_device(pages.shape, pages.dtype),
        on_device((R, case.max_pages), i32),
        on_device((R,), i32),
        on_device((R,), i32),
        on_device((H,), f32) if case.sinks else None,
        on_device((2, K), f32) if case.kv_dtype else None,
    )
    return lowered.compile()


def _step_program(form: str, bucket: Bucket, backend: Backend, mesh: MeshShape) -> Program:
    page_size = 16
    shape = CacheShape(1, page_size, num_slots=64, max_pages=STEP_SPEC.max_position // page_size, dtype=DTYPE)

    def pool(num_pages: int) -> jax.ShapeDtypeStruct:
        K, D = STEP_SPEC.num_kv_heads // mesh.model, STEP_SPEC.head_size
        return kv_pages_struct(LAYERS, num_pages, page_size, K, D, DTYPE, backend)

    shape = replace(shape, num_pages=POOL_BYTES // _num_bytes(pool(1)))

    def compile_for(mesh: Mesh) -> jax.stages.Compiled:
        params = abstract_params(STEP_SPEC, DTYPE, "stacked", mesh)
        pages = shape.pages(STEP_SPEC, backend, mesh)
        return compile_step(params, pages, STEP_SPEC, shape, bucket, backend, mesh)

    name = f"step/{form}/{backend.kind}{f'/{mesh}' if mesh.num_devices > 1 else ''}"
    return Program(name, mesh, _num_bytes(pool(shape.num_pages)), SMALLEST_MATRIX_BYTES // mesh.model, compile_for)


def _num_bytes(struct: jax.ShapeDtypeStruct) -> int:
    return struct.size * struct.dtype.itemsize
