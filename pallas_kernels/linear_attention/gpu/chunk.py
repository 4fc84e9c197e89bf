"""Takes tokens into states by products of matrices, a chunk after the other (Mosaic GPU).

What a chunk does to any state is known before (`factors.py`). So a row's states go from chunk to chunk in the registers
of a warpgroup, 64 lines of one head for each CTA. The operands of chunks come by TMA, in pieces of 64 columns. A piece
is fetched as soon as the one seven before it is used.

A state and what is added to it are the left operands, which matrix units take from registers: lines, which are values,
are the rows of all products, and tokens or keys their columns.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import GpuChip
from pallas_kernels.linear_attention.gpu.factors import CHUNK, PARTS, chunk_factors, split
from pallas_kernels.linear_attention.gpu.single import StateTokens
from pallas_kernels.linear_attention.visits import chunk_visits
from pallas_kernels.mosaic_gpu import LANES, TILE, Ref, barriers, interpretation, matrix_unit_of, swizzled
from pallas_kernels.ragged_paged_attention.rows import RaggedRows

BF16 = jnp.dtype(jnp.bfloat16)
# A row with more tokens goes by chunks. By counting, a chunk takes as long as 35 tokens one by one would if they waited
# for nothing. They do, so it is half of that, which no GPU has confirmed.
FEW_TOKENS = 16
# A state takes half as many registers of a thread, beside its parts and three products of 64 columns.
MOST_KEYS = 128
# A chunk has eight pieces of operands. With as many stages, each would have a place that is known when compiling, and
# the compilers would keep the addresses of all matrices in registers, for which others are spilled (600 bytes).
STAGES = 7


class ChunkPlan(NamedTuple):
    """The plan of `take_chunks`. It depends on the rows, and is the same for all layers of a step."""

    rows: jax.Array  # i32[N, 3]: first visit, number of visits, page of the state before, or -1
    num_rows: jax.Array  # i32[1]
    visits: jax.Array  # i32[V, 4]: tile, begin and end of its tokens there, page for the state after it, or 0 for none
    of_tokens: jax.Array  # i32[n C]: the visit of each token, or -1

    def lasts(self) -> jax.Array:
        """Returns the last token of each visit, i32[V]. Visits after the last one have any."""
        return jnp.maximum(self.visits[:, 0] * CHUNK + self.visits[:, 2] - 1, 0)


def plan_chunks(rows: RaggedRows, page_size: int, is_taken: jax.Array) -> ChunkPlan:
    """Makes the plan of `take_chunks` for the rows `is_taken` bool[R], which have more than `FEW_TOKENS` tokens."""
    num_tokens = len(rows.token_rows)
    in_chunk = rows.is_real() & is_taken[rows.token_rows]
    visits = chunk_visits(rows, page_size, in_chunk)
    is_visit = visits.highs > visits.lows
    until = jnp.cumsum(is_visit & (visits.firsts == 1), dtype=jnp.int32)
    number = jnp.arange(min(len(rows.kv_lens), num_tokens // (FEW_TOKENS + 1)) + 1, dtype=jnp.int32)
    first = jnp.searchsorted(until, number, side="right", method="compare_all").astype(jnp.int32)
    first = jnp.minimum(first, jnp.sum(is_visit, dtype=jnp.int32))
    at = jnp.minimum(first[:-1], len(until) - 1)
    before = jnp.where(visits.begins == 1, -1, visits.sources)[at]
    # A token belongs to the first visit that ends after it.
    token = jnp.arange(-(-num_tokens // CHUNK) * CHUNK, dtype=jnp.int32)
    ends = jnp.where(is_visit, visits.tiles * CHUNK + visits.highs, len(token))
    of_token = jnp.searchsorted(ends, token, side="right", method="compare_all").astype(jnp.int32)
    in_chunk = jnp.pad(in_chunk, (0, len(token) - num_tokens))
    return ChunkPlan(
        jnp.stack([first[:-1], jnp.diff(first), before], axis=1),
        until[-1:],
        jnp.stack([visits.tiles, visits.lows, visits.highs, visits.targets], axis=1),
        jnp.where(in_chunk, of_token, -1),
    )


class _OperandPiece(NamedTuple):
    """64 columns of an operand, all parts of them: bf16[PARTS * 64, 64]."""

    name: str
    block: int


@dataclass(frozen=True)
class ChunkUnit:
    """The work of a CTA on chunks, for matrices of `keys` and any multiple of 64 values, with all known constants.

    In memory, a line is a column of the matrix [keys, values], or with `keys_last` a row of [values, keys].
    """

    keys: int
    keys_last: bool
    corrects: bool
    interpret: bool

    @property
    def blocks(self) -> range:
        """The blocks of 64 keys."""
        return range(self.keys // LANES)

    @property
    def pieces(self) -> list[_OperandPiece]:
        """The pieces that a chunk needs, in this order."""
        of_state = ("queries", "keys") if self.corrects else ("queries",)
        pieces = [_OperandPiece(name, block) for block in self.blocks for name in of_state]
        pieces += [_OperandPiece(name, 0) for name in (("system", "reads") if self.corrects else ("reads",))]
        return pieces + [_OperandPiece("added", block) for block in self.blocks]

    @property
    def memory(self) -> dict[str, Any]:
        """The kernel's shared memory."""
        return {
            "pieces": swizzled((STAGES, PARTS * CHUNK, LANES), BF16),
            # The values of a chunk, and then what is read.
            "values": plgpu.SMEM((CHUNK, TILE), jnp.float32),
            "piece_here": barriers(1, STAGES),
            "values_here": barriers(1),
        }

    def load(self, matrix: Ref) -> tuple[jax.Array, ...]:
        """Loads the lines of a state, f32[64, 64] for each block of keys."""
        if self.keys_last:
            parts = [matrix.at[:, pl.ds(block * LANES, LANES)] for block in self.blocks]
            return tuple(plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False) for part in parts)
        return tuple(_load_turned(matrix.at[pl.ds(block * LANES, LANES)]) for block in self.blocks)

    def store(self, state: tuple[jax.Array, ...], matrix: Ref) -> None:
        """Stores the lines of a state."""
        for block, part in enumerate(state):
            keys = pl.ds(block * LANES, LANES)
            if self.keys_last:
                matrix[:, keys] = part
            else:
                _store_turned(part, matrix.at[keys])

    def times(self, sums: list[jax.Array], x: jax.Array, pieces: list[Ref], *, turned: bool) -> list[jax.Array]:
        """Returns f32[64, 64] + x f32[64, 64] @ y for each of `sums` and of `pieces`.

        A piece has the parts of y or, `turned`, of its transpose. The three smallest of nine products of parts are left
        out, because they are 2^-24 of the whole or less.
        """
        lefts = split(x)
        rights = [[piece.at[pl.ds(part * CHUNK, CHUNK)] for part in range(PARTS)] for piece in pieces]
        rights = [[y.transpose((1, 0)) for y in parts] for parts in rights] if turned else rights
        # The smallest products are the first.
        pairs = [(i, j) for i in reversed(range(PARTS)) for j in reversed(range(PARTS - i))]
        if self.interpret:  # the interpreter of jax 0.11.2 multiplies from shared memory only
            for i, j in pairs:
                products = [jnp.dot(lefts[i], y[j][...], preferred_element_type=jnp.float32) for y in rights]
                sums = [total + product for total, product in zip(sums, products, strict=True)]
            return sums

        def multiply(sums: list[Ref]) -> None:
            for i, j in pairs:
                for total, y in zip(sums, rights, strict=True):
                    plgpu.wgmma(total, lefts[i], y[j])

        return pl.run_state(multiply)([plgpu.WGMMAAccumulatorRef.init(total) for total in sums])


def choose_chunks(
    matrix: tuple[int, int], *, keys_last: bool, corrects: bool, chip: GpuChip, interpret: bool
) -> ChunkUnit | None:
    """Returns what `take_chunks` does with matrices of such a shape, or None where it does not take them.

    Values must be a multiple of 64, keys 64 or 128, and the chip a Hopper. With `mma` each warp would read the operands
    from shared memory for itself, which takes 192 cycles for a token, nearly as long as tokens one by one.
    """
    values, keys = matrix if keys_last else matrix[::-1]
    if values % TILE or keys % LANES or keys > MOST_KEYS or matrix_unit_of(chip) != "wgmma":
        return None
    return ChunkUnit(keys, keys_last, corrects, interpret)


def take_chunks(
    pages: jax.Array,
    read: jax.Array,
    place: jax.Array | int,
    plan: ChunkPlan,
    tokens: StateTokens,
    rest: jax.Array,
    *,
    unit: ChunkUnit,
    chip: GpuChip,
) -> tuple[jax.Array, jax.Array]:
    """Takes the tokens of the rows of a plan into the states of layer `place`, and returns `read` and the pages.

    It does what `take_tokens` does, and puts what is read for these tokens into its `read`, in place.

    rest  # f32[V, K, the other rows, W]: what pages get beside the matrices
    """
    num_tokens, groups, heads, size = tokens.values.shape
    num_rows = pages.shape[3] - rest.shape[2]  # of the matrices of a group
    factors = chunk_factors(tokens, plan.of_tokens, plan.lasts(), corrects=unit.corrects)
    by_channel = factors.kept.shape[-1] > 1
    given = {
        "place": jnp.asarray(place, jnp.int32)[None],
        **plan._asdict(),
        **{name: x for name, x in factors._asdict().items() if x is not None},
        "values": factors.values.reshape(*factors.values.shape[:2], -1),
        "rest": rest,
        "pages": jax.new_ref(pages),
        "read": jax.new_ref(read.reshape(num_tokens, groups, -1)),
    }
    pieces, parts = unit.pieces, heads * size // TILE
    of_row = groups * parts
    ctas = min(chip.num_sms, len(plan.rows) * of_row)
    each = prod(rest.shape[2:]) // (4 * 32)
    rest_layout = plgpu.Layout.WG_STRIDED(rest.shape[2:], next(size for size in (4, 2, 1) if each % size == 0))

    def kernel(*refs: Ref, **memory: Ref) -> None:
        at = dict(zip(given, refs, strict=True))
        cta = lax.axis_index("cta")

        def take_row(index: jax.Array, done: jax.Array) -> jax.Array:
            """Takes the tokens of a row into some lines of one head, after `done` pieces. Returns their number then."""
            number = cta + index * ctas
            row, number = lax.div(number, of_row), lax.rem(number, of_row)
            group, line = lax.div(number, parts), lax.rem(number, parts) * TILE
            head, lines = lax.div(line, size), pl.ds(line, TILE)
            first, num_visits, before = (at["rows"][row, i] for i in range(3))

            def matrix(page: jax.Array) -> Ref:
                of_group = at["pages"].at[at["place"][0], page, group]
                if unit.keys_last:  # the lines of heads follow each other
                    return of_group.at[lines]
                return of_group.at[pl.ds(head * unit.keys, unit.keys), pl.ds(lax.rem(line, size), TILE)]

            def slot(piece: jax.Array) -> jax.Array:
                return lax.rem(piece, jnp.int32(STAGES))

            def fetch(visit: jax.Array, number: int) -> None:
                """Fetches piece `number`, counted from the begin of a visit on. It may be that of a later visit."""
                later, piece = divmod(number, len(pieces))
                visit, (name, block) = visit + later, pieces[piece]

                @pl.when(visit < num_visits)
                def _() -> None:
                    source = at[name].at[at["visits"][first + visit, 0], group]
                    source = source.at[head] if name in ("system", "reads") else source
                    into = slot(done + visit * len(pieces) + piece)
                    source = source.at[:, pl.ds(block * LANES, LANES)]
                    plgpu.copy_gmem_to_smem(source, memory["pieces"].at[into], memory["piece_here"].at[into])

            def fetch_values(visit: jax.Array) -> None:
                @pl.when(visit < num_visits)
                def _() -> None:
                    tokens = pl.ds(at["visits"][first + visit, 0] * CHUNK, CHUNK)
                    source = at["values"].at[tokens, group, lines]
                    plgpu.copy_gmem_to_smem(source, memory["values"], memory["values_here"])

            def take_visit(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                visit = first + index
                begin = at["visits"][visit, 0] * CHUNK
                own, numbers = pl.ds(begin, CHUNK), iter(range(len(pieces)))

                def times(sums: list[jax.Array], x: jax.Array, turned: bool = True) -> list[jax.Array]:
                    """Returns sums + x y for the next pieces, which have the parts of each y or, turned, of y^T."""
                    taken = [next(numbers) for _ in sums]
                    slots = [slot(done + index * len(pieces) + piece) for piece in taken]
                    for place in slots:
                        plgpu.barrier_wait(memory["piece_here"].at[place])
                    operands = [memory["pieces"].at[place] for place in slots]
                    sums = unit.times(sums, x, operands, turned=turned)
                    plgpu.commit_smem()  # all warps have read the pieces
                    for piece in taken:
                        fetch(index, piece + STAGES)
                    return sums

                def of_tokens(name: str) -> jax.Array:
                    return _of_columns(at[name].at[group, head, own])

                products = [_zeros()] * (2 if unit.corrects else 1)
                for part_of_state in state:
                    products = times(products, part_of_state)
                left = of_tokens("left")
                read, *said = [left * product for product in products]
                plgpu.barrier_wait(memory["values_here"])
                errors = _load_turned(memory["values"])
                if unit.corrects:
                    errors = errors - said[0]
                errors = jnp.where(_of_columns(at["of_tokens"].at[own]) == visit, errors, 0.0)
                if unit.corrects:
                    [errors] = times([_zeros()], errors, turned=False)
                [read] = times([read], errors)
                _store_turned(read, memory["values"])
                plgpu.commit_smem()
                low, high = at["visits"][visit, 1], at["visits"][visit, 2]
                _copy_rows(memory["values"], at["read"].at[:, group, lines], begin, low, high)
                kept = at["kept"].at[visit, group, head]
                keys = [pl.ds(block * LANES, LANES) for block in unit.blocks]
                kept = [_of_columns(kept.at[own]) for own in keys] if by_channel else [kept[0]] * len(keys)
                forgotten = [left * part for left, part in zip(kept, state, strict=True)]
                state = tuple(times(forgotten, errors * of_tokens("since"), turned=False))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()  # all warps know that what is read is stored
                fetch_values(index + 1)
                page = at["visits"][visit, 3]

                @pl.when(page > 0)
                def _() -> None:
                    unit.store(state, matrix(page))

                @pl.when((page > 0) & (line == 0))
                def _() -> None:
                    into = at["pages"].at[at["place"][0], page, group, pl.ds(num_rows, rest.shape[2])]
                    into[...] = plgpu.load(at["rest"].at[visit, group], layout=rest_layout)

                return state

            fetch_values(jnp.int32(0))
            for piece in range(STAGES):
                fetch(jnp.int32(0), piece)
            state = unit.load(matrix(jnp.maximum(before, 0)))
            state = tuple(jnp.where(jnp.broadcast_to(before >= 0, part.shape), part, 0.0) for part in state)
            lax.fori_loop(0, num_visits, take_visit, state)
            return done + num_visits * len(pieces)

        count = lax.div(at["num_rows"][0] * of_row - cta + (ctas - 1), jnp.int32(ctas))
        lax.fori_loop(0, count, take_row, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=unit.memory,
        grid=(ctas,),
        grid_names=("cta",),
        interpret=interpretation(unit.interpret),
        kernel_name="take_chunks",
    )(*given.values())
    return jax.freeze(given["read"]).reshape(read.shape), jax.freeze(given["pages"])


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((TILE, CHUNK), jnp.float32), plgpu.Layout.WGMMA)


def _of_columns(ref: Ref) -> jax.Array:
    """Loads a number for each of 64 columns, and repeats it for all rows."""
    numbers = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(numbers, (TILE, LANES), (1,)), plgpu.Layout.WGMMA)


def _load_turned(ref: Ref) -> jax.Array:
    """Loads the transpose of a matrix."""
    turned = plgpu.load(ref.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return plgpu.layout_cast(turned, plgpu.Layout.WGMMA)


def _store_turned(x: jax.Array, ref: Ref) -> None:
    """Stores the transpose of a matrix."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def _copy_rows(tile: Ref, out: Ref, begin: jax.Array, low: jax.Array, high: jax.Array) -> None:
    """Starts to copy rows low .. high - 1 of a tile to `out`, where row `begin` is the first one of the tile.

    The rows around them are those of others. The number of rows of a copy must be known when compiling.
    """
    is_whole = high - low == CHUNK

    @pl.loop(lax.select(is_whole, high, low), high)
    def _(row: jax.Array) -> None:
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(row, 1)], out.at[pl.ds(begin + row, 1)])

    if out.shape[0] >= CHUNK:

        @pl.when(is_whole)
        def _() -> None:
            plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(begin, CHUNK)])
