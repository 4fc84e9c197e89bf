"""Attention over pages for CPUs: one item of work is a tile of queries of one row, for one KV head.

An item goes through what its queries see in blocks of tokens, with an online softmax in float32 (arXiv 2205.14135).
`products.py` and `softmax.py` have the inner loops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.cpu.amx import ROWS as TILE_ROWS
from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_loop
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import exp2, first_lanes, lane, tanh
from pallas_kernels.ragged_paged_attention.cpu.products import FLOAT, VECTORS, Operands, Products
from pallas_kernels.ragged_paged_attention.cpu.softmax import MASKED, NO_PEAK, weigh_functions

MAX_QUERIES = 64  # of a tile, the heads of a group counted, unless one group has more
TILE_QUERIES = 128  # the same where tiles of AMX multiply: packing a key takes as long as multiplying it by 64
FEW = 16  # so many queries read values where they are; more of them read a packed copy
_TILE = 16  # bytes of an entry of the list of tiles: the row, and its first query


def attention(e: Emitter, frame: Frame, dtype: str, kv_dtype: str, scaled: str) -> None:
    """Emits the handler for queries in `dtype` and pages of `kv_dtype`. Its arguments are those of `call.attend`.

    scaled: by-token where the key and the value of each token have scales of their own
    """
    types = Operands.of(e.chip, dtype, kv_dtype), scaled == "by-token"
    call = _Call(e, frame, *types)
    tiles = e.call_c("malloc", (call.num_tokens + 1) * _TILE)
    count = _list_tiles(call, tiles)

    def attend(t: Emitter, item: Value, captured: Sequence[Value]) -> None:
        address, tiles, count = captured
        call = _Call(t, Frame(t, address), *types)
        # The last tiles of a prompt take the longest: begun first, none of them is left when all others are done.
        tile = tiles + (count - 1 - item // call.num_kv_heads) * _TILE
        _attend(_Item(call, t.load_int(tile), t.load_int(tile + 8), item % call.num_kv_heads))

    parallel_loop(e, frame, count * call.num_kv_heads, (frame.address, tiles, count), attend)
    e.call_c("free", tiles)


class _Call:
    """The arguments of one call. They are loaded where this is made."""

    def __init__(self, e: Emitter, frame: Frame, operands: Operands, by_token: bool):
        self.e, self.operands, self.by_token = e, operands, by_token
        self.dtype, self.size = operands.dtype, SIZE_OF[operands.dtype]
        self.kv_dtype, self.kv_size = operands.kv_dtype, SIZE_OF[operands.kv_dtype]
        q, pages, table, starts, lengths, integers, floats, sinks, slopes, needed, scales = (
            frame.argument(i) for i in range(11)
        )
        out = frame.result(0)
        self.q, self.pages, self.out = q.data, pages.data, out.data
        self.num_tokens, self.num_heads, self.key_size = (q.size(i) for i in range(3))
        self.num_pages, self.num_kv_heads, self.page_size, self.width = (pages.size(i) for i in range(1, 5))
        self.value_size = out.size(2)
        self.table, self.num_rows, self.max_pages = table.data, table.size(0), table.size(1)
        self._starts, self._lengths = starts.data, lengths.data
        self.layer, self.window = (e.load_int(integers.data + 4 * i, 32) for i in range(2))
        self.scale = floats.data  # its address
        self.soft_cap = e.load_float(floats.data + FLOAT)
        self.sinks, self.has_sinks = sinks.data, sinks.size(0) > 0
        self.slopes, self.has_slopes = slopes.data, slopes.size(0) > 0
        self.scales = scales.data
        self.num_scales = scales.size(3) if by_token else e.integer(0)  # of a token: latents have one
        self._needed, self._all_needed = needed.data, needed.size(0).equals(0)
        self.group = self.num_heads // self.num_kv_heads
        self.units = self.key_size // operands.per_unit  # of a key
        self.tile_tokens = e.max(e.integer(MAX_QUERIES) // self.group, e.integer(1))
        if operands.in_tiles:
            tokens = e.integer(TILE_QUERIES) // self.group
            self.tile_tokens = e.max(
                e.select(tokens < TILE_ROWS, tokens, tokens // TILE_ROWS * TILE_ROWS), e.integer(1)
            )

    def query_start(self, row: Value) -> Value:
        return self.e.load_int(self._starts + row * 4, 32)

    def kv_len(self, row: Value) -> Value:
        return self.e.load_int(self._lengths + row * 4, 32)

    def is_needed(self, first: Value, end: Value) -> Value:
        """Returns whether one of the tokens from `first` to before `end` is needed."""
        e = self.e
        found = e.variable(e.select(self._all_needed, e.integer(1), e.integer(0)))
        with e.when(found.get().equals(0)), e.loop(first, end) as token:
            found.set(found.get() | e.load_int(self._needed + token * 4, 32))
        return found.get() > 0

    def zero(self, first: Value, end: Value) -> None:
        """Writes zeros as the output of the tokens from `first` to before `end`."""
        width = self.num_heads * self.value_size
        with self.e.loop(first * width, end * width, self.e.lanes) as at:
            self.e.store(self.out + at * self.size, self.e.vector(0), self.dtype)


def _list_tiles(call: _Call, tiles: Value) -> Value:
    """Writes down the tiles with a token that is needed, and returns how many there are.

    The output of all other tokens becomes 0.
    """
    e = call.e
    count = e.variable(e.integer(0))
    with e.loop(0, call.num_rows) as row:
        first, end = call.query_start(row), call.query_start(row + 1)
        with e.when(call.kv_len(row).equals(0)):
            call.zero(first, end)
        with e.when(call.kv_len(row) > 0):
            with e.loop(first, end, call.tile_tokens) as token:
                tile, until = tiles + count.get() * _TILE, e.min(token + call.tile_tokens, end)
                is_needed = call.is_needed(token, until)
                with e.when(is_needed):
                    e.store_int(tile, row)
                    e.store_int(tile + 8, token)
                    count.set(count.get() + 1)
                with e.when(is_needed.equals(0)):
                    call.zero(token, until)
    call.zero(call.query_start(call.num_rows), call.num_tokens)
    return count.get()


class _Item:
    """The queries of a tile for one KV head: `count` tokens, `num_queries` with their heads, token by token."""

    def __init__(self, call: _Call, row: Value, token: Value, head: Value):
        e = call.e
        self.call, self.e, self.head = call, e, head
        left = call.query_start(row + 1) - token
        self.count = e.min(left, call.tile_tokens)
        self.num_queries = self.count * call.group
        self.start = call.kv_len(row) - left  # position of the first query
        self.last = self.start + (self.count - 1)
        self.first_seen = e.max(self.start + 1 - call.window, e.integer(0))
        self.block = VECTORS * e.lanes
        self._first_head = token * call.num_heads + head * call.group
        self._table = call.table + row * call.max_pages * 4
        self._page_bits = e.log2(call.page_size)

    def head_at(self, token: Value, head: Value | int) -> Value:
        """Returns the number, among the heads of all tokens, of a query head of a token of the tile."""
        return self._first_head + token * self.call.num_heads + head

    def kv_at(self, token: Value) -> Value:
        """Returns the address of the key of a token of the row. The value is at the end of the same row."""
        call = self.call
        return call.pages + (self._slab(token) * call.page_size + self._offset(token)) * call.width * call.kv_size

    def scales_at(self, token: Value, number: Value | int) -> Value:
        """Returns the address of a token's scale, of which that of its key is number 0. The next token's follows."""
        call = self.call
        row = self._slab(token) * call.num_scales + number
        return call.scales + (row * call.page_size + self._offset(token)) * FLOAT

    def _slab(self, token: Value) -> Value:
        """Returns the place of the token's page and head among those of all layers."""
        call = self.call
        page = self.e.load_int(self._table + (token >> self._page_bits) * 4, 32)
        return (call.layer * call.num_pages + page) * call.num_kv_heads + self.head

    def _offset(self, token: Value) -> Value:
        """Returns the token's place in its page."""
        return token & (self.call.page_size - 1)


@dataclass(frozen=True)
class _Scratch:
    """Addresses of what an item computes with, M queries. The first three are in units (`products.py`)."""

    queries: Value  # [M, D]
    keys: Value  # [D, block]
    values: Value  # [block, V]
    logits: Value  # f32[M, block], then the weights, in units
    sums: Value  # f32[M, V]: weighted values
    peaks: Value  # f32[M]
    totals: Value  # f32[M]: the denominators
    scales: Value  # f32[2, block]: of keys and of values, where tokens have some

    @classmethod
    def at(cls, base: Value, item: _Item) -> tuple["_Scratch", Value]:
        """Places it after `base`, each part at a multiple of 64 bytes. Returns it with its end."""
        call, lanes, M, block = item.call, item.e.lanes, item.num_queries, item.block
        V, whole_key = call.value_size, (call.units + (lanes - 1)) // lanes * lanes
        places, end = [], base
        # Peaks and totals of a few queries are read as a whole vector.
        for size in (M * call.units, whole_key * block, V * block, M * block, M * V, M + lanes, M + lanes, block * 2):
            places.append(end)
            end = end + (size * FLOAT + 63) // 64 * 64
        return cls(*places), end


def _attend(item: _Item) -> None:
    e, operands = item.e, item.call.operands
    _, size = _Scratch.at(e.integer(64), item)
    memory = e.call_c("malloc", size)
    scratch, _ = _Scratch.at((memory + 63) // 64 * 64, item)
    products, weigh = Products.emit(e, operands), weigh_functions(e, VECTORS, operands)
    _begin(item, scratch)
    products.begin(e, item.num_queries)
    with e.loop(item.first_seen // item.block * item.block, item.last + 1, item.block) as block:
        _fold(item, scratch, products, weigh, block)
    products.end(e, item.num_queries)
    _end(item, scratch)
    e.call_c("free", memory)


def _begin(item: _Item, scratch: _Scratch) -> None:
    """Copies the queries, and begins the softmax."""
    call, e = item.call, item.e
    width = call.group * call.key_size
    with e.loop(0, item.count) as j, e.loop(0, width, e.lanes) as d:
        source = call.q + (item.head_at(j, 0) * call.key_size + d) * call.size
        if call.operands.in_pairs:
            e.store_halves(scratch.queries + (j * width + d) * call.size, e.load_halves(source))
        else:
            e.store(scratch.queries + (j * width + d) * FLOAT, e.load(source, call.dtype))
    with e.loop(0, item.num_queries * call.value_size, e.lanes) as d:
        e.store(scratch.sums + d * FLOAT, e.vector(0))
    with e.loop(0, item.num_queries) as m:
        e.store_float(scratch.peaks + m * FLOAT, e.number(NO_PEAK))
        e.store_float(scratch.totals + m * FLOAT, e.number(0))


def _fold(item: _Item, scratch: _Scratch, products: Products, weigh: Mapping[int, ir.Function], block: Value) -> None:
    """Folds the tokens from `block` on into the softmax."""
    call, e, M = item.call, item.e, item.num_queries
    D, V, width = call.units, call.value_size, item.block * FLOAT
    # The tokens of the block that some query sees. What the others' pages hold is never multiplied: it may be NaN.
    low, high = e.max(item.first_seen - block, e.integer(0)), e.min(item.last + 1 - block, e.integer(item.block))
    first, vectors = low // e.lanes * e.lanes, (high + (e.lanes - 1)) // e.lanes
    with e.loop(first, high, e.lanes) as t:
        ahead = item.kv_at(e.min(block + t + e.lanes, item.last))
        e.call(products.transpose, item.kv_at(block + t), ahead, scratch.keys + t * FLOAT, D, call.width)
        if call.by_token:
            _copy_scales(item, scratch, block, t)
    products.add_logits(e, scratch.queries, scratch.keys, scratch.logits, M, D, call.scale, vectors)
    if call.by_token:
        _scale(item, scratch, scratch.scales)
    with e.when(call.soft_cap > 0):
        cap = e.splat(call.soft_cap)
        with e.loop(0, M * item.block, e.lanes) as at:
            logits = e.load(scratch.logits + at * FLOAT)
            e.store(scratch.logits + at * FLOAT, cap * tanh(logits / cap))
    with e.when(call.has_slopes):
        _lean(item, scratch, block)
    with e.when((block + (item.block - 1) > item.start) | (block <= item.last - call.window)):
        _mask(item, scratch, block)
    for count, m in e.groups(tuple(weigh), M):
        state = (of_queries + m * FLOAT for of_queries in (scratch.peaks, scratch.totals))
        e.call(weigh[count], scratch.logits + m * width, *state, scratch.sums + m * V * FLOAT, V)
    if call.by_token:
        _scale(item, scratch, scratch.scales + width)
    _add_values(item, scratch, products, block, low, high)


def _add_values(item: _Item, scratch: _Scratch, products: Products, block: Value, low: Value, high: Value) -> None:
    """Adds the weighted values of the tokens from `low` to before `high` of a block to the sums."""
    call, e, M = item.call, item.e, item.num_queries
    V, width, step, per_unit = call.value_size, item.block * FLOAT, products.step, call.operands.per_unit
    in_pages = e.select(M <= FEW, e.integer(1), e.integer(0)) if products.values_in_pages else e.integer(0)
    together = max(step, e.lanes)
    with e.loop(low // together * together, (high + (step - 1)) // step * step, e.lanes) as t:
        start, end = e.max(low, t) - t, e.min(high, t + e.lanes) - t
        values = item.kv_at(e.min(block + t, item.last)) + (call.width - V) * call.kv_size
        ahead = item.kv_at(e.min(block + item.block + t, item.last))
        with e.when(in_pages.equals(0)):
            place = scratch.values + t // per_unit * V * FLOAT
            e.call(products.pack, values, ahead, place, V, call.width, start, end)
        if products.values_in_pages:
            with e.when(in_pages > 0):
                for count, m in e.groups(tuple(products.values_in_pages), M):
                    weights, sums = scratch.logits + m * width + t * FLOAT, scratch.sums + m * V * FLOAT
                    e.call(products.values_in_pages[count], values, ahead, weights, sums, V, call.width, start, end)
    with e.when(in_pages.equals(0)):
        whole = max(step, per_unit)
        first, until = low // whole * whole // per_unit, (high + (whole - 1)) // whole * whole // per_unit
        products.add_values(e, scratch.values, scratch.logits, scratch.sums, M, V, first, until)


def _copy_scales(item: _Item, scratch: _Scratch, block: Value, t: Value) -> None:
    """Copies the scales of a vector of tokens, from the one at `block + t` on: they are of one page."""
    e = item.e
    # The value of a latent is a part of its key.
    numbers: tuple[Value | int, ...] = 0, item.call.num_scales - 1
    for part, number in enumerate(numbers):
        e.store(scratch.scales + (t + item.block * part) * FLOAT, e.load(item.scales_at(block + t, number)))


def _scale(item: _Item, scratch: _Scratch, scales: Value) -> None:
    """Multiplies the logits of a block, or its weights, by scales [block] of its tokens.

    What tokens get that no query sees is not read, or masked later: their scales may be anything.
    """
    e = item.e
    with e.loop(0, item.num_queries) as m:
        for i in range(VECTORS):
            at = scratch.logits + (m * item.block + i * e.lanes) * FLOAT
            e.store(at, e.load(at) * e.load(scales + i * e.lanes * FLOAT))


def _lean(item: _Item, scratch: _Scratch, block: Value) -> None:
    """Subtracts from the logits of a block the distances of their tokens, times the slopes of their heads."""
    call, e = item.call, item.e
    with e.loop(0, item.num_queries) as m:
        slope = e.splat(e.load_float(call.slopes + (item.head * call.group + m % call.group) * FLOAT))
        position = item.start + m // call.group
        for i in range(VECTORS):
            at = scratch.logits + (m * item.block + i * e.lanes) * FLOAT
            ahead = e.floats(e.numbered(block + i * e.lanes - position))
            e.store(at, e.fma(slope, ahead, e.load(at)))


def _mask(item: _Item, scratch: _Scratch, block: Value) -> None:
    """Masks the logits of tokens that a query does not see."""
    e = item.e
    with e.loop(0, item.num_queries) as m:
        position = item.start + m // item.call.group
        end, before = position + 1 - block, position + 1 - item.call.window - block  # of what the query sees
        for i in range(VECTORS):
            at = scratch.logits + (m * item.block + i * e.lanes) * FLOAT
            some = e.select(first_lanes(end - i * e.lanes, e.lanes), e.load(at), e.vector(MASKED))
            e.store(at, e.select(first_lanes(before - i * e.lanes, e.lanes), e.vector(MASKED), some))


def _end(item: _Item, scratch: _Scratch) -> None:
    """Divides by the denominators, sinks included, and stores the output."""
    call, e, V = item.call, item.e, item.call.value_size
    with e.loop(0, item.count) as j:
        with e.loop(0, call.group) as g:
            m = j * call.group + g
            factor = e.variable(e.number(1))
            total = e.variable(e.load_float(scratch.totals + m * FLOAT))
            with e.when(call.has_sinks):
                sink = e.load_float(call.sinks + (item.head * call.group + g) * FLOAT)
                peak = e.load_float(scratch.peaks + m * FLOAT)
                most = e.max(peak, sink)
                factor.set(lane(exp2(e.splat(peak - most)), 0))
                total.set(total.get() * factor.get() + lane(exp2(e.splat(sink - most)), 0))
            share = e.splat(factor.get() / total.get())
            out = call.out + item.head_at(j, g) * V * call.size
            with e.loop(0, V, e.lanes) as d:
                e.store(out + d * call.size, e.load(scratch.sums + (m * V + d) * FLOAT) * share, call.dtype)
