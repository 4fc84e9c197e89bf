"""The operations that every kind of layer uses: matmuls with weights in any form, and activation functions.

They are few and large, because each operation has a cost in XLA on CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.forms.form import (
    Activation,
    Arrays,
    BoundedSwiglu,
    ClampedSwiglu,
    Experts,
    Form,
    Gating,
    Matrix,
    item_of,
)
from jaxvllm.models.forms.plain import MATRIX, PLAIN
from jaxvllm.models.token_adapters import RowAdapters, TokenAdapters
from pallas_kernels.grouped_matmul import RowOrder


@dataclass(frozen=True)
class OneOf:
    """The same matrix of several layers, each in its own arrays. `index` chooses one while the step runs."""

    matrices: tuple[jax.Array | Matrix, ...]
    index: jax.Array | int


@dataclass(frozen=True)
class Slice:
    """One layer's slice of a stack of matrices."""

    matrix: jax.Array | Matrix


@dataclass(frozen=True)
class InStack:
    """The matrix of one layer in a stack [L, ..] of those of several layers, of which no slice is taken.

    It is that of experts [X, ..], or is in a form that reads stacks.
    """

    stack: jax.Array | Matrix
    index: jax.Array | int


@dataclass(frozen=True)
class Adapted:
    """A matrix to whose products the adapters of tokens add theirs: (x A^T) B, see `models.lora`.

    One by one, `a` has a matrix [W, in] for each slot, and `b` one [R + 1, ..], whose last row says which part of R of
    the W ranks a row of the matrix has. Otherwise they are matrices of all slots, [N W, in] and [.., N W].
    By one and `ratios` f32[N, ..] the products of the matrix itself are multiplied before.
    """

    matrix: "Weight"
    a: Any
    b: Any
    ratios: "ExpertsWeight"
    tokens: TokenAdapters
    one_by_one: bool

    def added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns y [T, ..] and what adapters add to it for x [T, in]."""
        if not self.one_by_one:
            return self._added_masked(x, y)
        added = self._by_kernel(x, y)
        return self._added_in_turn(x, y) if added is None else added

    def product(self, x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
        """Returns the product with x [T, in], with all that adapters do to it."""
        y = project(x, self.matrix, dtype=dtype)
        if not self.one_by_one:
            return self._added_masked(x, y, multiplies=True)
        own = self._by_kernel(x, y, multiplies=True)
        return self._added_in_turn(x, self._multiplied(y)) if own is None else own

    def gated(self, x: jax.Array, gating: Gating) -> jax.Array | None:
        """Returns what `project_gated` says, or None where no kernel does that."""
        if not self.one_by_one:
            return None
        return self._by_kernel(x, project(x, self.matrix, dtype=jnp.float32), gating, multiplies=True)

    def _added_masked(self, x: jax.Array, y: jax.Array, multiplies: bool = False) -> jax.Array:
        """Adds what the adapters of all slots make of x, each of its own tokens.

        With `multiplies`, y is multiplied by one and the ratios before. All of it is rounded once.
        """
        h = self.tokens.masked(project(x, self.a))
        total = y.astype(jnp.float32)
        if multiplies:
            # A gather of each token's ratios would be a kernel of its own.
            own = jnp.zeros((), jnp.float32)
            for number, has_slot in enumerate(self.tokens.has_slot):
                own = jnp.where(has_slot.reshape(-1, *(1,) * (y.ndim - 1)), _matrix_of(self.ratios, number), own)
            total *= 1 + own
        return (total + self._raised(h).astype(jnp.float32)).astype(y.dtype)

    def _raised(self, h: jax.Array) -> jax.Array:
        """Returns the product of B and h [T, N W], [T, ..].

        A slice of a stack is no product of its own, as those of matrices are: what is added to it follows in the same
        kernel on TPUs, where each kernel of a decode step takes 2,000 cycles at least (v6e, libtpu's estimate).
        """
        if not isinstance(self.b, Slice):
            return project(h, self.b)
        form, [arrays] = _opened([self.b.matrix])
        up = form.plain(arrays)
        return jax.lax.dot_general(h, up, (((1,), (up.ndim - 1,)), ((), ())))

    def _multiplied(self, y: jax.Array) -> jax.Array:
        """Returns y [T, ..] times one and the ratios."""
        own = matrices_at(self.ratios, jnp.maximum(self.tokens.slots - 1, 0))
        has_own = (self.tokens.slots > 0).reshape(-1, *(1,) * (y.ndim - 1))
        return (y.astype(jnp.float32) * (1 + jnp.where(has_own, own, 0))).astype(y.dtype)

    def _by_kernel(
        self, x: jax.Array, y: jax.Array, gating: Gating | None = None, multiplies: bool = False
    ) -> jax.Array | None:
        """Adds what the slots in use add, in one kernel, or returns None where there is none.

        With `multiplies`, y is multiplied by one and the ratios before.
        """
        if isinstance(self.a, InStack) or isinstance(self.ratios, InStack):
            return None
        a, b, ratios = (one if isinstance(one, OneOf) else OneOf((one,), 0) for one in (self.a, self.b, self.ratios))
        (form, downs), (_, ups) = _opened(a.matrices), _opened(b.matrices)
        factors = _opened(ratios.matrices)[1] if multiplies else None
        return form.add_low_rank(y, x, downs, ups, a.index, self.tokens.order, gating, factors)

    def _added_in_turn(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Adds what the slots in use add, one after the other."""
        tokens = self.tokens

        def with_slot(number: jax.Array, y: jax.Array) -> jax.Array:
            slot = tokens.in_use[number]
            down, up = (_matrix_of(stack, slot - 1) for stack in (self.a, self.b))
            h = jax.lax.dot_general(x, down, (((1,), (1,)), ((), ())))
            own = jnp.where((tokens.slots == slot)[:, None], h, jnp.zeros((), h.dtype))
            rank, flat = len(up) - 1, up.reshape(len(up), -1)
            more = jnp.zeros((len(x), flat.shape[1]), h.dtype)
            for part in range(h.shape[1] // rank):
                of_part = own[:, part * rank : (part + 1) * rank] @ flat[:rank]
                more = jnp.where(flat[rank] == part, of_part, more)
            return y + more.reshape(y.shape).astype(y.dtype)

        return jax.lax.fori_loop(0, tokens.num_in_use, with_slot, y)


@dataclass(frozen=True)
class AdaptedExperts:
    """The matrices [X, .., in] of experts, to whose products the adapters of rows add theirs, see `models.expert_lora`.

    With a kernel, each expert has a matrix [W, in] of `a` and one [R + 1, ..] of `b`, as in `Adapted`, for each of S
    slots. Otherwise it has one of all slots, [S W, in] and [.., S W].
    """

    matrices: "ExpertsWeight"
    a: "ExpertsWeight"
    b: "ExpertsWeight"
    num_slots: int
    has_kernel: bool

    def product(self, x: jax.Array, starts: jax.Array, adapters: RowAdapters) -> jax.Array:
        """Returns what `project_grouped` says.

        What an adapter makes of the rows of others may be infinite. So it is replaced, and not multiplied by zero.
        """
        y = project_grouped(x, self.matrices, starts)
        if self.has_kernel:
            added = self._by_kernel(x, y, adapters.order)
            assert added is not None, "the arrays are those of a kernel"
            return added
        h = project_grouped(x, self.a, starts)
        of_slots = h.reshape(len(x), self.num_slots, -1)
        is_own = adapters.slots[:, None] == jnp.arange(1, self.num_slots + 1)
        own = jnp.where(is_own[:, :, None], of_slots, jnp.zeros((), h.dtype)).reshape(h.shape)
        return y + project_grouped(own, self.b, starts).astype(y.dtype)

    def gated(self, x: jax.Array, starts: jax.Array, adapters: RowAdapters, gating: Gating) -> jax.Array | None:
        """Returns what `project_grouped_gated` says, or None where no kernel does that."""
        if not self.has_kernel or gating not in ("silu", "gelu_tanh"):
            return None
        y = _of_experts(self.matrices, lambda form, own: form.grouped_product(x, own, starts, jnp.float32))
        return self._by_kernel(x, y, adapters.order, gating)

    def _by_kernel(self, x: jax.Array, y: jax.Array, order: RowOrder, gating: Gating | None = None) -> jax.Array | None:
        assert not isinstance(self.a, InStack) and not isinstance(self.b, InStack), "it reads no stacks of layers"
        a, b = (one if isinstance(one, OneOf) else OneOf((one,), 0) for one in (self.a, self.b))
        (form, downs), (_, ups) = _opened(a.matrices), _opened(b.matrices)
        # Experts and slots become one dimension, for which nothing is moved.
        flat_downs, flat_ups = (
            [{name: one.reshape(-1, *one.shape[2:]) for name, one in arrays.items()} for arrays in several]
            for several in (downs, ups)
        )
        return form.add_low_rank(y, x, flat_downs, flat_ups, a.index, order, gating)


Weight = jax.Array | Matrix | OneOf | Slice | InStack | Adapted
ExpertsWeight = jax.Array | Matrix | OneOf | InStack


def project(x: jax.Array, weight: Weight, bias: jax.Array | None = None, dtype: DTypeLike | None = None) -> jax.Array:
    """Multiplies x [T, in] by weight [.., in] and adds `bias` [..]: [T, ..] in `dtype` (None: that of x)."""
    if isinstance(weight, Adapted):
        return biased(weight.product(x, dtype), bias)
    if isinstance(weight, OneOf):
        return biased(
            by_form(weight, lambda form, matrices, index: form.product_with_one(x, matrices, index, dtype)), bias
        )
    if isinstance(weight, InStack):
        form, [arrays] = _opened([weight.stack])
        return biased(form.product_in_stack(x, arrays, weight.index, dtype), bias)
    is_slice = isinstance(weight, Slice)
    form, [arrays] = _opened([weight.matrix if isinstance(weight, Slice) else weight])
    return biased(form.product(x, arrays, dtype, is_slice), bias)


def project_gated(x: jax.Array, weight: Weight, gating: Gating, bias: jax.Array | None = None) -> jax.Array:
    """Returns up x gated by gate x, [T, F], for x [T, in] and weight [2, F, in], gate before up; bias [2, F]."""
    if isinstance(weight, Adapted) and bias is None and (own := weight.gated(x, gating)) is not None:
        return own
    if isinstance(weight, Slice | InStack | Adapted):
        return gated(project(x, weight, bias), gating)

    def product(form: Form, matrices: Sequence[Arrays], index: jax.Array | int) -> jax.Array:
        if bias is None and (own := form.gated_product(x, matrices, index, gating)) is not None:
            return own
        return gated(biased(form.product_with_one(x, matrices, index, None), bias), gating)

    return by_form(weight if isinstance(weight, OneOf) else OneOf((weight,), 0), product)


def project_heads(equation: str, x: jax.Array, weight: jax.Array | OneOf) -> jax.Array:
    """Multiplies x [T, H, ..] by the matrix of each head, of weight [K, G, .., ..], as an einsum of "t", "h" says."""

    def product(x: jax.Array, matrices: jax.Array) -> jax.Array:
        def multiply(x: jax.Array, of_heads: jax.Array) -> jax.Array:
            return jnp.einsum(equation, x, of_heads, preferred_element_type=jnp.float32)

        def multiply_with_rows_first(x: jax.Array, of_heads: jax.Array) -> jax.Array:
            operands, result = equation.split("->")
            by_head = f"{operands}->ht{result[-1]}"
            return jnp.einsum(by_head, x, of_heads, preferred_element_type=jnp.float32).swapaxes(0, 1)

        # For a result by row jnp.einsum makes the matrices the first operand of the product. YNNPACK takes no first
        # operand that is summed over its first dimension, and XLA:CPU of jax 0.11.2 cannot run what remains in bfloat16
        # ("Unsupported element type for DotThunk"). Converted to float32, two rows took 3.3 ms and not 0.13 (16 heads
        # of 128x512).
        of_heads = matrices.reshape(-1, *matrices.shape[2:])
        y = jax.lax.platform_dependent(x, of_heads, cpu=multiply_with_rows_first, default=multiply)
        return y.astype(x.dtype)

    if not isinstance(weight, OneOf):
        return product(x, weight)
    branches = [partial(product, matrices=arrays[MATRIX]) for arrays in _opened(weight.matrices)[1]]
    result: jax.Array = jax.lax.switch(weight.index, branches, x)
    return result


def project_grouped(
    x: jax.Array, weight: ExpertsWeight | AdaptedExperts, starts: jax.Array, adapters: RowAdapters | None = None
) -> jax.Array:
    """Multiplies each row of x [N, in] by the matrix of its group, of weight [X, .., in]: [N, ..].

    Rows starts[g] to starts[g + 1], i32[X + 1], are those of group g. The others are arbitrary afterwards. `adapters`
    are those of the rows, where the weight has any.
    """
    if isinstance(weight, AdaptedExperts):
        assert adapters is not None, "matrices are adapted where rows have adapters"
        return weight.product(x, starts, adapters)
    return _of_experts(weight, lambda form, experts: form.grouped_product(x, experts, starts))


def project_grouped_gated(
    x: jax.Array,
    weight: ExpertsWeight | AdaptedExperts,
    starts: jax.Array,
    gating: Gating,
    bias: jax.Array | None = None,
    adapters: RowAdapters | None = None,
) -> jax.Array:
    """Returns up x gated by gate x, [N, F], for rows in groups, as above, weight [X, 2, F, in], and bias [N, 2, F]."""
    if isinstance(weight, AdaptedExperts):
        assert adapters is not None, "matrices are adapted where rows have adapters"
        if bias is None and (own := weight.gated(x, starts, adapters, gating)) is not None:
            return own
        return gated(biased(weight.product(x, starts, adapters), bias), gating)

    def product(form: Form, experts: Experts) -> jax.Array:
        if bias is None and (own := form.grouped_gated_product(x, experts, starts, gating)) is not None:
            return own
        return gated(biased(form.grouped_product(x, experts, starts), bias), gating)

    return _of_experts(weight, product)


def _of_experts(weight: ExpertsWeight, product: Callable[[Form, Experts], jax.Array]) -> jax.Array:
    """Returns the product with the experts of a layer, of which the form and the place are told."""
    if isinstance(weight, OneOf):
        return by_form(weight, lambda form, stacks, index: product(form, Experts(stacks, index)))
    form, [arrays] = _opened([weight.stack if isinstance(weight, InStack) else weight])
    if not isinstance(weight, InStack):
        return product(form, Experts([arrays]))
    # Layers and experts become one dimension, for which nothing is moved.
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
    num_experts = next(iter(arrays.values())).shape[1]
    return product(form, Experts([flat], first=weight.index * num_experts))


def matrices_at(weight: ExpertsWeight, numbers: jax.Array) -> jax.Array:
    """Returns matrices `numbers` i32[..] of a layer's [X, ..], which are plain."""

    def taken(_: Form, experts: Experts) -> jax.Array:
        def of_stack(arrays: Arrays) -> jax.Array:
            return jnp.take(arrays[MATRIX], experts.first + numbers, axis=0, mode="clip")

        branches = [partial(of_stack, arrays) for arrays in experts.stacks]
        result: jax.Array = jax.lax.switch(experts.index, branches) if len(branches) > 1 else branches[0]()
        return result

    return _of_experts(weight, taken)


def by_form(weight: OneOf, product: Callable[[Form, Sequence[Arrays], jax.Array | int], jax.Array]) -> jax.Array:
    """Returns the product with the matrix that is chosen, of which the form and all matrices in that form are told.

    Layers have one form, unless a checkpoint stores their matrices in several ways: then the step branches to one.
    """
    forms = [matrix.form if isinstance(matrix, Matrix) else PLAIN for matrix in weight.matrices]
    kinds = list(dict.fromkeys(forms))
    alike = [[matrix for matrix, own in zip(weight.matrices, forms, strict=True) if own == form] for form in kinds]
    branches = [partial(product, form, _opened(matrices)[1]) for form, matrices in zip(kinds, alike, strict=True)]
    if len(branches) == 1:
        return branches[0](weight.index)
    places = np.array([forms[:number].count(form) for number, form in enumerate(forms)], np.int32)
    numbers = np.array([kinds.index(form) for form in forms], np.int32)
    result: jax.Array = jax.lax.switch(jnp.asarray(numbers)[weight.index], branches, jnp.asarray(places)[weight.index])
    return result


def look_up(table: jax.Array | Matrix, numbers: jax.Array) -> jax.Array:
    """Returns the rows i32[T] of a table [V, E], [T, E]. Numbers beyond it are those of its first or last row."""
    form, [arrays] = _opened([table])
    return form.look_up(arrays, numbers)


def row_dtype(table: jax.Array | Matrix) -> DTypeLike:
    """Returns the dtype of the rows of a table."""
    form, [arrays] = _opened([table])
    return form.row_dtype(arrays)


def rows_of(table: jax.Array | Matrix) -> jax.Array:
    """Returns the array of a table, which has its rows, and perhaps more in each."""
    _, [arrays] = _opened([table])
    [rows] = arrays.values()
    return rows


def _matrix_of(weight: ExpertsWeight, number: jax.Array | int) -> jax.Array:
    """Returns one of several matrices [X, ..], by a number that is known while the step runs."""
    if isinstance(weight, OneOf):
        branches = [partial(_matrix_of, matrices, number) for matrices in weight.matrices]
        one: jax.Array = jax.lax.switch(weight.index, branches) if len(branches) > 1 else branches[0]()
        return one
    form, [arrays] = _opened([weight.stack if isinstance(weight, InStack) else weight])
    matrices = form.plain(arrays)
    if not isinstance(weight, InStack):
        return item_of(matrices, number)
    # Layers and matrices become one dimension, for which nothing is moved.
    return item_of(matrices.reshape(-1, *matrices.shape[2:]), weight.index * matrices.shape[1] + number)


def _opened(matrices: Sequence[jax.Array | Matrix]) -> tuple[Form, list[Arrays]]:
    """Returns the form of all `matrices`, and the arrays of each."""
    forms = {matrix.form if isinstance(matrix, Matrix) else PLAIN for matrix in matrices}
    assert len(forms) == 1, "the matrices of equal layers have one form"
    return forms.pop(), [matrix.arrays if isinstance(matrix, Matrix) else {MATRIX: matrix} for matrix in matrices]


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies the activation function of that name to each element."""
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "relu":
        return jax.nn.relu(x)
    if activation == "relu_squared":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def gated(gate_up: jax.Array, gating: Gating) -> jax.Array:
    """Returns the features gate_up[:, 1] as the gate gate_up[:, 0] lets them through: [T, F] of [T, 2, F]."""
    gate, up = gate_up[:, 0], gate_up[:, 1]
    if isinstance(gating, BoundedSwiglu):
        return jnp.minimum(jax.nn.silu(gate), gating.limit) * jnp.clip(up, -gating.limit, gating.limit)
    if not isinstance(gating, ClampedSwiglu):
        return activate(gate, gating) * up
    gate, up = jnp.minimum(gate, gating.limit), jnp.clip(up, -gating.limit, gating.limit)
    return (up + 1) * gate * jax.nn.sigmoid(gating.alpha * gate)


def biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds `bias` to `x`, if there is one."""
    return x if bias is None else x + bias
