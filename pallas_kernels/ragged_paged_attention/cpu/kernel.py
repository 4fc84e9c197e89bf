"""Attention over pages for CPUs: one item of work is a tile of queries of one row, for one KV head.

An item goes through its context in blocks of `4 * lanes` tokens, with an online softmax in float32 (arXiv 2205.14135):

    keys      transposed into a buffer, once for all queries of the tile, so that logits of neighbouring
              tokens are the lanes of a vector and no sum goes across lanes
    logits    query x keys, bent by the soft cap, masked where the block reaches beyond what a query sees
    values    weight x value, a few queries by a few vectors of the head at a time, in registers
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.cpu.emit import SIZE_OF, Emitter, Value
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_loop

VECTORS = 4  # of tokens in a block, and of a head that are accumulated at a time
MAX_QUERIES = 64  # of a tile, all heads of a group counted, unless the group alone has more
MASKED = -1e30  # finite, so that a difference of two is no NaN
_FLOAT = 4
_WORD = 8


def attention(e: Emitter, frame: Frame, dtype: str) -> None:
    """Emits the handler. Arguments: see `call.attend`."""
    call = _Call(e, frame, dtype)
    tiles = e.call_c("malloc", (call.num_tokens + 1) * (2 * _WORD))
    count = _list_tiles(e, call, tiles)
    captured = (frame.address, tiles)

    def attend(t: Emitter, item: Value, captured: Sequence[Value]) -> None:
        inner = _Call(t, Frame(t, captured[0]), dtype)
        tile = captured[1] + item // inner.num_kv_heads * (2 * _WORD)
        _Item(inner, t.load_int(tile), t.load_int(tile + _WORD), item % inner.num_kv_heads).attend()

    parallel_loop(e, frame, count * call.num_kv_heads, captured, attend)
    e.call_c("free", tiles)


def _list_tiles(e: Emitter, call: "_Call", tiles: Value) -> Value:
    """Writes down the row and the first query of each tile, and returns how many there are. It zeros all other outputs."""
    count = e.variable(e.integer(0))
    with e.loop(0, call.num_rows) as row:
        first, end = call.query_start(row), call.query_start(row + 1)
        with e.when(call.kv_len(row).equals(0)):
            call.zero(first, end)
        with e.when(call.kv_len(row) > 0):
            with e.loop(first, end, call.tile_tokens) as token:
                e.store_int(tiles + count.get() * (2 * _WORD), row)
                e.store_int(tiles + count.get() * (2 * _WORD) + _WORD, token)
                count.set(count.get() + 1)
    call.zero(call.query_start(call.num_rows), call.num_tokens)
    return count.get()


class _Call:
    """The arguments of one call. All that is loaded here is loaded where the call is made."""

    def __init__(self, e: Emitter, frame: Frame, dtype: str):
        self.e, self.frame, self.dtype = e, frame, dtype
        self.size = SIZE_OF[dtype]  # bytes of an element
        q, pages = frame.argument(0), frame.argument(1)
        self.num_tokens, self.num_heads, self.head_size = (q.size(i) for i in range(3))
        self.num_pages, self.num_kv_heads, self.page_size = (pages.size(i) for i in range(1, 4))
        self.num_rows = frame.argument(2).size(0)
        self.group = self.num_heads // self.num_kv_heads
        self.tile_tokens = e.max(e.integer(MAX_QUERIES) // self.group, e.integer(1))

    def query_start(self, row: Value) -> Value:
        return self.e.load_int(self.frame.argument(3).data + row * 4, 32)

    def kv_len(self, row: Value) -> Value:
        return self.e.load_int(self.frame.argument(4).data + row * 4, 32)

    def number(self, index: int) -> Value:
        return self.e.load_int(self.frame.argument(5).data + index * 4, 32)

    def factor(self, index: int) -> Value:
        return self.e.load_float(self.frame.argument(6).data + index * 4)

    def zero(self, first: Value, end: Value) -> None:
        """Zeros the output of the tokens from `first` to before `end`."""
        width = self.num_heads * self.head_size
        with self.e.loop(first * width, end * width, self.e.lanes) as at:
            self.e.store(self.frame.result(0).data + at * self.size, self.e.vector(0), self.dtype)


@dataclass(frozen=True)
class _Item:
    """The queries of some tokens of a row, from `token` on, and one KV head."""

    call: _Call
    row: Value
    token: Value
    head: Value

    def attend(self) -> None:
        call, e = self.call, self.call.e
        D, G, block, window = call.head_size, call.group, VECTORS * e.lanes, call.number(1)
        count = e.min(call.query_start(self.row + 1) - self.token, call.tile_tokens)
        M = count * G
        start = call.kv_len(self.row) - (call.query_start(self.row + 1) - self.token)  # position of the first query
        last = start + (count - 1)
        first_seen = e.max(start + 1 - window, e.integer(0))

        sizes = (D * block, M * block, M * D, M * D, M, M)
        places, total = [], e.integer(64)
        for size in sizes:
            places.append(total)
            total = total + (size * _FLOAT + 63) // 64 * 64
        scratch = e.call_c("malloc", total)
        base = scratch // 64 * 64
        keys, logits, queries, sums, peaks, totals = (base + place for place in places)

        group_at = (self.token * call.num_heads + self.head * G) * D  # of q and the output, in elements
        step = call.num_heads * D  # from token to token
        scale = e.splat(call.factor(0))
        q, out = call.frame.argument(0).data, call.frame.result(0).data
        with e.loop(0, count) as j:
            with e.loop(0, G * D, e.lanes) as d:
                x = e.load(q + (group_at + j * step + d) * call.size, call.dtype)
                e.store(queries + (j * G * D + d) * _FLOAT, x * scale)
                e.store(sums + (j * G * D + d) * _FLOAT, e.vector(0))
        with e.loop(0, M) as m:
            e.store_float(peaks + m * _FLOAT, e.number(MASKED))
            e.store_float(totals + m * _FLOAT, e.number(0))

        pages = call.frame.argument(1).data
        layer_pages = call.number(0) * call.num_pages
        table = call.frame.argument(2)
        table_row = table.data + self.row * table.size(1) * 4
        S = call.page_size
        page_bits = e.log2(S)

        def kv_at(token: Value) -> Value:
            """The address of the keys of a token of the row; the values follow."""
            page = e.load_int(table_row + (token >> page_bits) * 4, 32)
            slab = (layer_pages + page) * call.num_kv_heads + self.head
            return pages + (slab * S + (token & (S - 1))) * D * (2 * call.size)

        transpose, dots, values = (self._transpose(), self._dots(), self._values())
        soft_cap = call.factor(1)
        with e.loop(first_seen // block * block, last + 1, block) as b:
            low, high = e.max(first_seen - b, e.integer(0)), e.min(last + 1 - b, e.integer(block))
            with e.loop(low // e.lanes * e.lanes, high, e.lanes) as t:
                e.call(transpose, kv_at(b + t), kv_at(e.min(b + t + e.lanes, last)), keys + t * _FLOAT, D)
            done = e.variable(e.integer(0))
            for rows, dot in dots.items():
                with e.loop(done.get(), M - (rows - 1), rows) as m:
                    e.call(dot, queries + m * D * _FLOAT, keys, logits + m * (block * _FLOAT), D)
                    done.set(m + rows)
            with e.when(soft_cap > 0):
                cap = e.splat(soft_cap)
                with e.loop(0, M * block, e.lanes) as at:
                    e.store(logits + at * _FLOAT, cap * e.tanh(e.load(logits + at * _FLOAT) / cap))
            with e.when((b + (block - 1) > start) | (b <= last - window)):
                self._mask(logits, M, G, start, window, b)
            self._weigh(logits, sums, peaks, totals, M, D)
            with e.loop(low // e.lanes * e.lanes, high, e.lanes) as t:
                first, end = e.max(low, t), e.min(high, t + e.lanes)
                v = kv_at(b + t) + D * call.size
                done = e.variable(e.integer(0))
                for rows, value in values.items():
                    with e.loop(done.get(), M - (rows - 1), rows) as m:
                        e.call(value, v, logits + (m * block + t) * _FLOAT, sums + m * D * _FLOAT, D, first - t, end - t)
                        done.set(m + rows)

        sinks = call.frame.argument(7)
        with e.loop(0, count) as j:
            with e.loop(0, G) as g:
                m = j * G + g
                factor = e.variable(e.number(1))
                weight = e.variable(e.load_float(totals + m * _FLOAT))
                with e.when(sinks.size(0) > 0):
                    sink = e.load_float(sinks.data + (self.head * G + g) * _FLOAT)
                    peak = e.load_float(peaks + m * _FLOAT)
                    most = e.max(peak, sink)
                    factor.set(e.lane(e.exp(e.splat(peak - most)), 0))
                    weight.set(weight.get() * factor.get() + e.lane(e.exp(e.splat(sink - most)), 0))
                share = e.splat(factor.get() / weight.get())
                with e.loop(0, D, e.lanes) as d:
                    x = e.load(sums + (m * D + d) * _FLOAT) * share
                    e.store(out + (group_at + j * step + g * D + d) * call.size, x, call.dtype)
        e.call_c("free", scratch)

    def _transpose(self):
        """Emits keys of `lanes` tokens -> buffer [D, block]."""
        dtype, size = self.call.dtype, self.call.size
        t = self.call.e.function("transpose", 4)
        kv, ahead, out, D = t.arguments
        with t.loop(0, D, t.lanes) as d:
            for i in range(2 * t.lanes):  # 64 rows of 192 tokens took 1.8 ms without this, and 1.2 with it
                t.prefetch(ahead + (D * i + d) * size, level=2)
            rows = [t.load(kv + (D * (2 * i) + d) * size, dtype) for i in range(t.lanes)]
            for i, column in enumerate(t.transposed(rows)):
                t.store(out + (d + i) * (VECTORS * t.lanes * _FLOAT), column)
        return t.finish()

    def _dots(self):
        """Emits, for several numbers of queries: queries [rows, D] x keys [D, block] -> logits [rows, block]."""
        functions = {}
        for rows in (4, 2, 1):
            t = self.call.e.function(f"dots{rows}", 4)
            q, keys, out, D = t.arguments
            width = t.lanes * _FLOAT
            sums = {(m, i): t.variable(t.vector(0)) for m in range(rows) for i in range(VECTORS)}
            with t.loop(0, D) as d:
                k = [t.load(keys + d * (VECTORS * width) + i * width) for i in range(VECTORS)]
                for m in range(rows):
                    x = t.splat(t.load_float(q + (D * m + d) * _FLOAT))
                    for i in range(VECTORS):
                        sums[m, i].set(t.fma(x, k[i], sums[m, i].get()))
            for (m, i), place in sums.items():
                t.store(out + (m * VECTORS + i) * width, place.get())
            functions[rows] = t.finish()
        return functions

    def _values(self):
        """Emits, for several numbers of queries: sums [rows, D] += weights [rows, tokens] x values [tokens, D]."""
        dtype, size = self.call.dtype, self.call.size
        functions = {}
        for rows in (4, 2, 1):
            t = self.call.e.function(f"values{rows}", 6)
            v, weights, out, D, first, end = t.arguments
            done = t.variable(t.integer(0))
            for vectors in (VECTORS, 1):
                width = vectors * t.lanes
                with t.loop(done.get(), D - (width - 1), width) as d:
                    at = {(m, i): out + (D * m + d + i * t.lanes) * _FLOAT for m in range(rows) for i in range(vectors)}
                    sums = {place: t.variable(t.load(address)) for place, address in at.items()}
                    with t.loop(first, end) as token:
                        x = [t.load(v + (token * D * 2 + d + i * t.lanes) * size, dtype) for i in range(vectors)]
                        for m in range(rows):
                            w = t.splat(t.load_float(weights + (token + m * (VECTORS * t.lanes)) * _FLOAT))
                            for i in range(vectors):
                                sums[m, i].set(t.fma(w, x[i], sums[m, i].get()))
                    for place, address in at.items():
                        t.store(address, sums[place].get())
                    done.set(d + width)
            functions[rows] = t.finish()
        return functions

    def _mask(self, logits, M, G, start, window, b) -> None:
        e = self.call.e
        block = VECTORS * e.lanes
        with e.loop(0, M) as m:
            position = start + m // G
            for i in range(VECTORS):
                at = logits + (m * block + i * e.lanes) * _FLOAT
                tokens = e.numbered(b + i * e.lanes)
                seen = (tokens <= e.splat(position)) & (tokens > e.splat(position - window))
                e.store(at, e.select(seen, e.load(at), e.vector(MASKED)))

    def _weigh(self, logits, sums, peaks, totals, M, D) -> None:
        """Turns logits into weights, and brings sums and totals to the new peaks."""
        e = self.call.e
        block = VECTORS * e.lanes
        with e.loop(0, M) as m:
            at = [logits + (m * block + i * e.lanes) * _FLOAT for i in range(VECTORS)]
            x = [e.load(address) for address in at]
            most = x[0]
            for other in x[1:]:
                most = e.max(most, other)
            old = e.load_float(peaks + m * _FLOAT)
            peak = e.max(e.largest(most), old)
            with e.when(peak > old):
                decay = e.exp(e.splat(old - peak))
                e.store_float(peaks + m * _FLOAT, peak)
                e.store_float(totals + m * _FLOAT, e.load_float(totals + m * _FLOAT) * e.lane(decay, 0))
                with e.loop(0, D, e.lanes) as d:
                    place = sums + (m * D + d) * _FLOAT
                    e.store(place, e.load(place) * decay)
            total = e.vector(0)
            for address, logit in zip(at, x, strict=True):
                weight = e.select(logit <= e.vector(MASKED / 2), e.vector(0), e.exp(logit - e.splat(peak)))
                e.store(address, weight)
                total = total + weight
            e.store_float(totals + m * _FLOAT, e.load_float(totals + m * _FLOAT) + e.lane(e.sums([total]), 0))
