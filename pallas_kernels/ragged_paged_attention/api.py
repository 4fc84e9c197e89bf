"""The API of ragged paged attention: checks arguments, fits them to the backend, writes the new KV, and attends."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import CpuChip, GpuChip, TpuChip
from pallas_kernels.ragged_paged_attention import reference, sparse
from pallas_kernels.ragged_paged_attention.layout import (
    PAGE_SIZES,
    AbstractPages,
    KVPages,
    RowLayout,
    ScaledPages,
    codes_of,
    scale_shape,
    shares_keys_with_few,
    takes_warps,
)
from pallas_kernels.ragged_paged_attention.quantize import KVQuantization
from pallas_kernels.ragged_paged_attention.rows import RaggedRows
from pallas_kernels.ragged_paged_attention.sparse import ChosenPositions, IndexQueries
from pallas_kernels.ragged_paged_attention.write import (
    read_kv,
    write_kv,
    write_scales,
)

# The result of `plan_rows`: a pytree that only its backend understands, or None where there is nothing to plan.
type Plan = Any


def plan_rows(
    rows: RaggedRows,
    kv_pages: KVPages | AbstractPages,
    *,
    num_heads: int,
    dtype: DTypeLike,
    backend: Backend,
    latent_size: int | None = None,
) -> Plan:
    """Makes the plan of `backend` for `rows`, which is the same for all layers: call this once a step.

    The plan is for queries of `num_heads` heads in `dtype` over pages like `kv_pages`, and with `latent_size` over
    latents in them. XLA does not move the planning out of a loop over layers by itself: it would be some six small
    kernels a layer on GPU.
    """
    codes: jax.Array | jax.ShapeDtypeStruct = codes_of(kv_pages)
    if not isinstance(backend.chip, GpuChip) or not shares_keys_with_few(num_heads // codes.shape[2], latent_size):
        return None
    width = codes.shape[-1]
    head_size = width // 2 if latent_size is None else width
    value_size = None if latent_size is None else RowLayout.of(head_size, latent_size, backend).value_size
    q = jax.ShapeDtypeStruct((len(rows.token_rows), num_heads, head_size), dtype)
    by_token = isinstance(kv_pages, ScaledPages)
    return _gpu_kernels(backend.chip).make_plan(rows, q, codes, backend.chip, value_size, by_token=by_token)


def _gpu_kernels(chip: GpuChip) -> Any:
    """Returns the package of kernels for this GPU. Kernels are imported where they run, because Pallas takes half a
    second of start-up."""
    if takes_warps(chip):
        from pallas_kernels.ragged_paged_attention import gpu_mma

        return gpu_mma
    from pallas_kernels.ragged_paged_attention import gpu

    return gpu


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_pages: KVPages,
    layer: jax.Array | int,
    rows: RaggedRows,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: jax.Array | int,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    quantization: KVQuantization | None = None,
    kv_scales: jax.Array | None = None,
    latent_size: int | None = None,
    index: IndexQueries | ChosenPositions | None = None,
    plan: Plan = None,
    backend: Backend = REFERENCE,
) -> tuple[jax.Array, KVPages]:
    """Writes this step's KV into the pages, then attends causally: a token sees its row's KV up to itself.

    q f[T, H, D], k and v f[T, K, D] with H a multiple of K; query head h reads KV head h // (H // K).
    A query sees the `window` positions that end at its own (`NO_WINDOW`: all). `soft_cap` c bends the scaled logits
    to c * tanh(logits / c) (Gemma 2, arXiv 2408.00118). `sinks` f32[H] are one more logit for each head, which
    takes weight and has no value (gpt-oss, arXiv 2508.10925). `slopes` f32[H] are what a logit of each head
    loses, after the soft cap, with each position between its key and its query (ALiBi, arXiv 2108.12409).
    Without k and v the pages hold this step's KV already.
    With `latent_size` L and without v, the last L elements of a key are its value, which pages store once (DeepSeek V2,
    arXiv 2405.04434). With `index` a key begins with its key in the index, and a query attends to the positions that
    the index chooses (`sparse.py`), or to all where no more fit the page table; an index may have chosen before
    (`choose_positions`). With `quantization` the pages hold keys and values in eight bits. Their scales are `kv_scales`
    f32[2, K], those of keys first (None: one), or each token has its own, and pages are `ScaledPages`. `plan` is the
    result of `plan_rows` for these rows. Returns f[T, H, D], or f[T, H, L] for latents, with arbitrary finite values
    for padding tokens, and the pages.
    Donate `kv_pages`, so that the write is in place.

    Raises ValueError for shapes and dtypes that do not agree, and NotImplementedError for arguments that only another
    backend supports. A page table that is too narrow for its longest row is not detected, because the length of a row
    is a value and not a shape.
    """
    _check(
        q, k, v, kv_pages, rows, soft_cap, window, sinks, slopes, index, quantization, kv_scales, latent_size, backend
    )
    head_size, dtype = q.shape[-1], q.dtype
    layout = RowLayout.of(head_size, latent_size, backend)
    pages, scales = kv_pages if isinstance(kv_pages, ScaledPages) else (kv_pages, None)
    new = None
    if k is not None:
        new, new_scales = _new_rows(k, v, pages, layout, quantization, kv_scales)
        scales = _with_new_scales(new_scales, scales, layer, rows, pages.shape[3], backend)
    if kv_scales is not None:
        # The kernels see codes. The scales that divided keys and values go into the queries and the output.
        q = _scale_heads(q, kv_scales[0])
    q = layout.key(q)
    options: dict[str, Any] = dict(scale=scale, soft_cap=soft_cap, window=window, sinks=sinks, slopes=slopes)
    value_size = layout.value_size if layout.is_latent else None
    if isinstance(index, IndexQueries) and not must_choose(index.top_k, rows, kv_pages):
        index = None
    if index is not None and latent_size is not None:
        if new is not None:
            pages = write_kv(new, pages, layer, rows)
        own, index_size = q[..., -head_size:], 0  # without padding
        stored: dict[str, Any] = {"quantization": quantization, "scales": scales}
        if isinstance(index, IndexQueries):
            index_size = index.q.shape[-1]
            index = sparse.choose(index, pages, layer, rows, head_size=head_size, **stored)
        stored |= {"latent_size": latent_size, "index_size": index_size}
        out = sparse.attend(own, index, pages, layer, rows, scale=scale, **stored)
    elif backend.kind == "tpu":
        if new is None:
            # Our kernel there writes while it attends, and writes again what it finds.
            new = read_kv(pages, layer, rows)
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.ragged_paged_attention import tpu

        assert isinstance(backend.chip, TpuChip)
        options |= {"latent_size": value_size, "chip": backend.chip, "interpret": backend.interpret}
        out, pages = tpu.attend(q, new, pages, layer, rows, scales=scales, **options)
    else:
        if new is not None:
            pages = write_kv(new, pages, layer, rows)
        options |= {"scales": scales}
        # Plain XLA reads the pages of GPUs, too, where more query heads share a KV head than their kernels take.
        if isinstance(backend.chip, GpuChip) and shares_keys_with_few(q.shape[1] // pages.shape[2], latent_size):
            options |= {"plan": plan, "latent_size": value_size, "chip": backend.chip, "interpret": backend.interpret}
            out = _gpu_kernels(backend.chip).attend(q, pages, layer, rows, **options)
        else:
            options |= {"value_size": layout.value_size, "quantization": quantization}
            if backend.kind == "cpu":
                from pallas_kernels.ragged_paged_attention import cpu

                assert isinstance(backend.chip, CpuChip)
                out = cpu.attend(q, pages, layer, rows, chip=backend.chip, **options)
            else:
                out = reference.attend(q, pages, layer, rows, **options)
    out = layout.value(out, latent_size or head_size)
    if kv_scales is not None:
        out = _scale_heads(out, kv_scales[0 if layout.is_latent else 1])
    return out.astype(dtype), pages if scales is None else ScaledPages(pages, scales)


def choose_positions(
    k: jax.Array,
    kv_pages: KVPages,
    layer: jax.Array | int,
    rows: RaggedRows,
    index: IndexQueries,
    *,
    quantization: KVQuantization | None = None,
    kv_scales: jax.Array | None = None,
    latent_size: int,
    backend: Backend,
) -> tuple[ChosenPositions, KVPages]:
    """Writes this step's keys k f[T, 1, D] into the pages, and returns what `index` chooses among them, and the pages.

    `ragged_paged_attention` without k then attends to these positions, in this layer or in another (GLM-5.2).
    """
    head_size = k.shape[-1]
    layout = RowLayout.of(head_size, latent_size, backend)
    pages, scales = kv_pages if isinstance(kv_pages, ScaledPages) else (kv_pages, None)
    new, new_scales = _new_rows(k, None, pages, layout, quantization, kv_scales)
    pages = write_kv(new, pages, layer, rows)
    scales = _with_new_scales(new_scales, scales, layer, rows, pages.shape[3], backend)
    # A scale of all keys changes no order of scores.
    stored: dict[str, Any] = {"quantization": quantization, "scales": scales}
    chosen = sparse.choose(index, pages, layer, rows, head_size=head_size, **stored)
    return chosen, pages if scales is None else ScaledPages(pages, scales)


def must_choose(top_k: int, rows: RaggedRows, kv_pages: KVPages) -> bool:
    """Returns whether a row of the page table has room for more than `top_k` positions: then an index chooses."""
    return rows.page_table.shape[1] * codes_of(kv_pages).shape[3] > top_k


def _new_rows(
    k: jax.Array,
    v: jax.Array | None,
    pages: jax.Array,
    layout: RowLayout,
    quantization: KVQuantization | None,
    kv_scales: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns this step's keys and values as rows of the pages, [T, K, W], and their own scales, f32[T, K, N]."""
    if quantization is None:
        return layout.row(k, v), None
    given, new_scales = [k] if v is None else [k, v], None
    if quantization.by_token:
        own = [quantization.token_scales(x) for x in given]
        new_scales = jnp.stack(own, axis=-1)
    else:
        own = list(jnp.ones((2, k.shape[1])) if kv_scales is None else kv_scales)
    k, *values = (quantization.encoded(x, of, pages.dtype) for x, of in zip(given, own, strict=False))
    return layout.row(k, values[0] if values else None), new_scales


def _with_new_scales(
    new: jax.Array | None,
    scales: jax.Array | None,
    layer: jax.Array | int,
    rows: RaggedRows,
    page_size: int,
    backend: Backend,
) -> jax.Array | None:
    """Returns the scales of pages with those of this step's tokens, or None where tokens have none."""
    if new is None or scales is None:
        return scales
    if backend.kind == "tpu":
        from pallas_kernels.ragged_paged_attention import tpu

        return tpu.write_scales(new, scales, layer, rows, page_size, interpret=backend.interpret)
    return write_scales(new, scales, layer, rows)


def _scale_heads(x: jax.Array, scales: jax.Array) -> jax.Array:
    """Multiplies x f[T, H, D] by the scale f32[K] of each head's KV head."""
    return (x.astype(jnp.float32) * jnp.repeat(scales, x.shape[1] // len(scales))[:, None]).astype(x.dtype)


def _check(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_pages: KVPages,
    rows: RaggedRows,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    index: IndexQueries | ChosenPositions | None,
    quantization: KVQuantization | None,
    kv_scales: jax.Array | None,
    latent_size: int | None,
    backend: Backend,
) -> None:
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, query heads, head size], not {q.shape}")
    num_tokens, num_heads, head_size = q.shape
    by_token = quantization is not None and quantization.by_token
    if isinstance(kv_pages, ScaledPages) != by_token:
        raise ValueError(
            f"pages must be ScaledPages where each token has scales of its own, and only there, not "
            f"{type(kv_pages).__name__} with {quantization}: make them with kv_pages_struct"
        )
    pages = codes_of(kv_pages)
    if pages.ndim != 5:
        raise ValueError(f"pages must be [layers, pages, KV heads, page size, 2 * head size], not {pages.shape}")
    _, _, num_kv_heads, page_size, width = pages.shape
    if page_size not in PAGE_SIZES:
        raise ValueError(f"pages must hold one of {PAGE_SIZES} tokens, not {page_size}")
    if latent_size is not None:
        if not 0 < latent_size <= head_size or v is not None:
            raise ValueError(f"latent_size {latent_size} must be in 1..{head_size}, a part of each key, and v None")
    elif (k is None) != (v is None):
        raise ValueError("give both k and v, or none of them, where the pages hold this step's already")
    new = [x for x in (k, v) if x is not None]
    if any(x.shape != (num_tokens, num_kv_heads, head_size) for x in new):
        shapes = ", ".join(f"{name} {x.shape}" for name, x in zip("kv", new, strict=False))
        raise ValueError(f"q {q.shape}, {shapes} do not fit pages of {num_kv_heads} heads, {pages.shape}")
    if any(x.dtype != q.dtype for x in new):
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in zip("kv", new, strict=False))
        raise ValueError(f"dtypes differ: q {q.dtype}, {dtypes}")
    layout = RowLayout.of(head_size, latent_size, backend)
    if width != (wanted := layout.width):
        raise ValueError(
            f"pages must be {wanted} wide, keys and values of heads of size {head_size} as the backend "
            f"{backend.kind} pads them, not {width}: make them with kv_pages_struct"
        )
    expected = (*pages.shape[:3], *scale_shape(page_size, layout.num_scales, backend))
    if isinstance(kv_pages, ScaledPages) and kv_pages.scales.shape != expected:
        raise ValueError(f"the scales of tokens must be {expected}, not {kv_pages.scales.shape}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if pages.dtype != (held := q.dtype if quantization is None else quantization.held_in(backend)):
        what = f"q's dtype {held}" if quantization is None else f"{held}, as the backend {backend.kind} holds codes"
        raise ValueError(f"pages must be of {what}, not {pages.dtype}")
    if rows.token_rows.shape != (num_tokens,):
        raise ValueError(f"rows describe {rows.token_rows.shape[0]} tokens, q has {num_tokens}")
    num_rows = len(rows.kv_lens)
    if rows.page_table.ndim != 2 or rows.page_table.shape[0] != num_rows or len(rows.query_starts) != num_rows + 1:
        raise ValueError(
            f"a page table {rows.page_table.shape} and {len(rows.query_starts)} query starts do not fit {num_rows} rows"
        )
    if num_rows > num_tokens or not rows.page_table.size:
        raise ValueError(f"{num_rows} rows of {rows.page_table.shape[1]} pages do not fit {num_tokens} tokens")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be above 0, not {soft_cap}: None is no cap")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window must be at least 1, the query's own position, not {window}: NO_WINDOW is none")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be one logit for each of {num_heads} query heads, not {sinks.shape}")
    if slopes is not None and slopes.shape != (num_heads,):
        raise ValueError(f"slopes must be one number for each of {num_heads} query heads, not {slopes.shape}")
    if slopes is not None and index is not None:
        raise NotImplementedError(
            "attention to the positions that an index chooses has no slopes: leave one of them out"
        )
    if kv_scales is not None and (quantization is None or quantization.by_token):
        kind = str(pages.dtype) if quantization is None else "with scales of their tokens' own"
        raise ValueError(f"kv_scales are for quantized pages without scales, these are {kind}: leave them out")
    if kv_scales is not None and kv_scales.shape != (2, num_kv_heads):
        raise ValueError(
            f"kv_scales must be [2, {num_kv_heads}], one for each KV head's keys and values, not {kv_scales.shape}"
        )
