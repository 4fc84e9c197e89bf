"""Runs all layers in loops on the device, so that equal layers are compiled once, however many there are.

A program of 28 layers took 82 s and 122 MiB to compile layer by layer, and 35 s and 36 MiB as a loop (CPU, 16 tokens,
busy machine).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.block import Block
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.form import Matrix, item_of
from jaxvllm.models.layer_input import Scalar
from jaxvllm.models.ops import InStack, OneOf, Slice
from jaxvllm.models.params import Params, declare_layer, layer_stacks
from jaxvllm.models.rope import no_rope
from jaxvllm.models.spec import ModelSpec
from pallas_kernels.ragged_paged_attention import NO_WINDOW


class LayerStep[Carry](Protocol):
    """Computes one layer.

    weights: the arrays of the layer, by name
    layer: the first layer of the run, which equals this layer, but maybe not in its window and rope
    number: the layer's number
    window, rope: those of this layer, as ints where all layers of the run share them
    """

    def __call__(
        self, carry: Carry, weights: Params, layer: Block, number: Scalar, window: Scalar, rope: Scalar, /
    ) -> Carry: ...


class OverLayers(Protocol):
    """Applies `step` to `carry` for every layer, from the first to the last, and returns the result."""

    def __call__[Carry](
        self, step: LayerStep[Carry], carry: Carry, layers: list[Params] | Params, spec: ModelSpec, /
    ) -> Carry: ...


@dataclass(frozen=True)
class Loop:
    """Runs of equal layers, one after the other, repeated `count` times. Each run is compiled once."""

    first: int  # number of the first layer
    count: int
    runs: tuple[int, ...]  # layers of each run

    @property
    def period(self) -> int:
        """The number of layers in one turn."""
        return sum(self.runs)

    def layers_of(self, run: int) -> np.ndarray:
        """Returns the numbers of the layers of a run, i32[count, layers of the run]."""
        first = self.first + sum(self.runs[:run])
        turns = np.arange(self.count, dtype=np.int32)[:, None] * np.int32(self.period)
        return turns + np.arange(first, first + self.runs[run], dtype=np.int32)


def layer_loops(layers: Sequence[Block], whole: Sequence[Block] | None = None) -> tuple[Loop, ...]:
    """Splits `layers` into loops.

    The layers of a run are equal, so that windows and ropes are constants for the compiler. If that would take more
    than two runs for each kind of layer, because windows have no pattern, then layers that differ only in window and
    rope count as equal. The step reads those numbers while it runs.
    A stage may begin and end within a pattern. So for its layers `whole`, the layers of the model, decide this.
    """
    whole = layers if whole is None else whole
    if sum(len(loop.runs) for loop in _loops(whole)) <= 2 * len(set(whole)):
        return _loops(layers)
    return _loops([replace(layer, window=None, rope=no_rope(layer.rope)) for layer in layers])


def _loops(kinds: Sequence[Hashable]) -> tuple[Loop, ...]:
    """Takes periods from the front, each time the one that covers most runs. A run outside a period is a loop."""
    runs = [(kind, len(tuple(equal))) for kind, equal in groupby(kinds)]
    starts = [0, *accumulate(length for _, length in runs)]
    loops, at = [], 0
    while at < len(runs):
        size, count = max(
            ((size, _repeats(runs, at, size)) for size in range(1, (len(runs) - at) // 2 + 1)),
            key=lambda found: (found[0] * found[1] if found[1] > 1 else 0, -found[0]),
            default=(1, 1),
        )
        size = size if count > 1 else 1
        loops.append(Loop(starts[at], count, tuple(length for _, length in runs[at : at + size])))
        at += size * count
    return tuple(loops)


def _repeats(runs: list[tuple[Hashable, int]], at: int, size: int) -> int:
    """Counts how often the `size` runs that begin at `at` follow each other."""
    count = 1
    while runs[at + count * size : at + (count + 1) * size] == runs[at : at + size]:
        count += 1
    return count


def over_layers[Carry](step: LayerStep[Carry], carry: Carry, layers: list[Params] | Params, spec: ModelSpec) -> Carry:
    """Applies `step` to `carry` for every layer, from the first to the last, and returns the result."""
    for loop in layer_loops(spec.layers, spec.whole.layers):
        runs = [_Run(spec, layers, loop.layers_of(run)) for run in range(len(loop.runs))]
        if loop.count == 1:
            [run] = runs
            carry = run.scan(step, carry)
        else:
            for run in runs:
                _ = run.vectors  # made before the loop, not in each turn
            carry = _repeat(loop.count, partial(_turn, step, runs), carry)
    return carry


def _turn[Carry](step: LayerStep[Carry], runs: Sequence["_Run"], turn: jax.Array, carry: Carry) -> Carry:
    for run in runs:
        if run.is_stacked:
            # XLA:GPU reads a slice in place if the counter of one loop selects it. In a loop within a loop it copied
            # each matrix (H200: 542 MB of temporaries, unrolled 35 MB, compiled in the same time).
            for i in range(run.length):
                carry = run.layer(step, turn, i, carry)
        else:
            carry = _repeat(run.length, partial(run.layer, step, turn), carry)
    return carry


def _repeat[Carry](count: int, body: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Returns `carry` after body(0, carry), ..., body(count - 1, carry).

    `jax.lax.fori_loop` would have two counters, and XLA recognises only reads that are indexed by the first.
    """
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, body(c[0], c[1])), (zero, carry))[1]


def known_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    """Returns the window that `over_layers` passes for each layer, where it is an int (`NO_WINDOW` included).

    None stands for a window that the step reads while it runs, because the layers of a run differ in it.
    """
    found: dict[int, int | None] = {}
    for loop in layer_loops(spec.layers):
        for numbers in map(loop.layers_of, range(len(loop.runs))):
            window = shared_numbers(spec, numbers.flat)["window"]
            found |= dict.fromkeys(numbers.flat, window if isinstance(window, int) else None)
    return tuple(found[layer] for layer in range(spec.num_layers))


def shared_numbers(spec: ModelSpec, numbers: Iterable[int]) -> dict[str, int | np.ndarray]:
    """Returns window and rope of the layers with these numbers: an int where all share it, else i32[layers]."""
    layers = [spec.layers[number] for number in numbers]
    windows = [NO_WINDOW if layer.window is None else layer.window for layer in layers]
    every = {"window": windows, "rope": [spec.ropes.index(layer.rope) for layer in layers]}
    return {name: v[0] if len(set(v)) == 1 else np.asarray(v, np.int32) for name, v in every.items()}


@dataclass(frozen=True, eq=False)
class _Vectors:
    """The vectors of layers, such as the weights of norms, side by side in one stack [layers, all their numbers].

    XLA:GPU copies a layer's slice of each stack of vectors before it computes with it. The four copies of a layer of
    Qwen3 0.6B took 6 us of an H100, and the whole layer about 100 with 64 rows that decode; now there is one.
    """

    widths: Mapping[str, int]  # in this order
    stack: jax.Array
    places: np.ndarray  # of the layers of a run in the stack, i32[turns, length]

    @classmethod
    def of(cls, stacks: Mapping[str, jax.Array], places: np.ndarray) -> Self:
        widths = {name: stack.shape[1] for name, stack in stacks.items()}
        return cls(widths, jnp.concatenate([*stacks.values()], 1), places)

    def parted(self, own: jax.Array) -> Params:
        """Returns the vectors of the layer that has these numbers."""
        ends = list(accumulate(self.widths.values()))
        return dict(zip(self.widths, jnp.split(own, ends[:-1]), strict=True))


@dataclass(frozen=True, eq=False)
class _Run:
    """One run of equal layers in each turn of a loop."""

    spec: ModelSpec
    params: list[Params] | Params  # of all layers of the model
    numbers: np.ndarray  # i32[turns, length]

    @property
    def length(self) -> int:
        return self.numbers.shape[1]

    @property
    def is_stacked(self) -> bool:
        return isinstance(self.params, dict)

    @cached_property
    def kind(self) -> Block:
        return self.spec.layers[self.numbers[0, 0]]

    @cached_property
    def decls(self) -> dict[str, ParamDecl]:
        return declare_layer(self.spec, self.numbers[0, 0])

    @cached_property
    def shared(self) -> dict[str, int | np.ndarray]:
        return shared_numbers(self.spec, self.numbers.flat)

    @cached_property
    def matrices(self) -> dict[str, tuple[Any, ...]]:
        """The matrices of all layers of the run, where layers have arrays of their own. `OneOf` chooses one.

        A stack of them would be copied slice by slice on CPU. So each matmul branches to its layer's own array.
        """
        if isinstance(self.params, dict):
            return {}
        names = [name for name, decl in self.decls.items() if decl.storage in ("matrix", "experts", "head_matrices")]
        return {name: tuple(self.params[number][name] for number in self.numbers.flat) for name in names}

    @cached_property
    def stacks(self) -> dict[str, tuple[Any, np.ndarray]]:
        """The stacks that contain all other arrays, and the places of these layers in them, i32[turns, length]."""
        if isinstance(self.params, list):
            layers = [self.params[number] for number in self.numbers.flat]
            every = np.arange(self.numbers.size).reshape(self.numbers.shape)
            names = [name for name in self.decls if name not in self.matrices]
            return {name: (jnp.stack([layer[name] for layer in layers]), every) for name in names}
        return {
            stack.name: (self.params[key], np.vectorize(stack.layers.index)(self.numbers))
            for key, stack in layer_stacks(self.spec).items()
            if self.numbers[0, 0] in stack.layers
        }

    @cached_property
    def vectors(self) -> tuple[_Vectors, ...]:
        """The stacks of vectors that can be joined: of one type and length, with these layers at the same places."""
        if not self.is_stacked:
            return ()
        alike: dict[Any, dict[str, jax.Array]] = {}
        for name, (stack, where) in self.stacks.items():
            if not isinstance(stack, Matrix) and stack.ndim == 2:
                alike.setdefault((stack.dtype, len(stack), where.tobytes()), {})[name] = stack
        joined = (stacks for stacks in alike.values() if len(stacks) > 1)
        return tuple(_Vectors.of(stacks, self.stacks[next(iter(stacks))][1]) for stacks in joined)

    def scan[Carry](self, step: LayerStep[Carry], carry: Carry) -> Carry:
        """Applies `step` to all layers of a loop that has one turn."""
        first = int(self.numbers[0, 0])
        joined = {name for vectors in self.vectors for name in vectors.widths}
        # A stack of exactly these layers is scanned. A part of a larger stack would be copied first.
        scanned = {
            name: stack
            for name, (stack, where) in self.stacks.items()
            if name not in joined and _length(stack) == where.size and not self._is_read_in_stack(name, stack)
        }
        varying = {name: values for name, values in self.shared.items() if not isinstance(values, int)}

        # The number is carried: that of the scan would be a copy of its counter, limited to the layers, which XLA:GPU
        # computes by a kernel.
        def scan_step(
            carried: tuple[jax.Array, Carry], xs: tuple[Params, dict[str, Any]]
        ) -> tuple[tuple[jax.Array, Carry], None]:
            (number, carry), (slices, numbers) = carried, xs
            about: dict[str, Any] = self.shared | numbers
            weights = self._weights(0, number - first if first else number, slices)
            carry = step(carry, weights, self.kind, number, about["window"], about["rope"])
            return (number + 1, carry), None

        begin = jnp.asarray(first, jnp.int32), carry
        return jax.lax.scan(scan_step, begin, (scanned, varying), length=self.length)[0][1]

    def layer[Carry](self, step: LayerStep[Carry], turn: jax.Array, i: Scalar, carry: Carry) -> Carry:
        """Applies `step` to layer `i` of the run, in that turn of the loop."""
        nth = turn * self.length + i
        about = {name: v if isinstance(v, int) else jnp.asarray(v)[nth] for name, v in self.shared.items()}
        number = _computed(self.numbers, turn, i)
        return step(carry, self._weights(turn, i, {}), self.kind, number, about["window"], about["rope"])

    def _is_read_in_stack(self, name: str, stack: Any) -> bool:
        """Tells whether no slice of a stack is taken: a loop reads the experts that are chosen where they are."""
        is_read_in_place = isinstance(stack, Matrix) and stack.form.reads_stacks
        return self.decls[name].storage == "experts" or is_read_in_place

    def _weights(self, turn: Scalar, i: Scalar, slices: Params) -> Params:
        """Returns the arrays of a layer. `slices` are those that a scan has sliced already."""
        weights: Params = {name: OneOf(of, turn * self.length + i) for name, of in self.matrices.items()}
        for vectors in self.vectors:
            weights |= vectors.parted(item_of(vectors.stack, index=_computed(vectors.places, turn, i)))
        for name, (stack, where) in self.stacks.items():
            if name in weights:
                continue
            if self._is_read_in_stack(name, stack):
                weights[name] = InStack(stack, _computed(where, turn, i))
                continue
            if name in slices:
                array = slices[name]
            else:
                at = _computed(where, turn, i)
                array = jax.tree.map(partial(item_of, index=at), stack)
            weights[name] = Slice(array) if self.decls[name].storage == "matrix" else array
        return weights


def _length(stack: Any) -> int:
    """Returns how many layers a stack has."""
    return len(jax.tree.leaves(stack)[0])


def _computed(table: np.ndarray, turn: Scalar, i: Scalar) -> Scalar:
    """Computes table[turn, i] as a sum, so that XLA sees where a loop reads.

    The distance between turns is always the same, and that between the layers of a run is one.
    """
    base, stride = int(table[0, 0]), int(table[-1, 0] - table[0, 0]) // max(len(table) - 1, 1)
    assert (table == base + np.arange(len(table))[:, None] * stride + np.arange(table.shape[1])).all()
    return base + turn * stride + i
