"""A matrix in parts: its rows are kept in several forms, as a checkpoint stores them in several ways."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.few_bits import Elements, FewBits
from jaxvllm.models.forms.form import Arrays
from jaxvllm.models.tiling import Fill


@dataclass(frozen=True)
class InParts(FewBits):
    """A matrix [.., in] is cut along one of its dimensions, which is not that of its inputs and is not divided.

    For example, queries and keys of each KV head are in one form, and its values in another. Each part is multiplied on
    its own. The names of its arrays begin with its number. No stack of experts is such a matrix.

    axis: the dimension that is cut
    parts: the size of each part along it, and its form
    """

    axis: int
    parts: tuple[tuple[int, FewBits], ...]

    def takes(self, matrix: ParamDecl) -> bool:
        return all(form.takes(matrix) for _, form in self.parts)

    def of_matrix(self, matrix: ParamDecl) -> "InParts":
        parts = [
            (size, form.of_matrix(part))
            for (size, form), (_, part, _) in zip(self.parts, self._parts(matrix), strict=True)
        ]
        return replace(self, parts=tuple(parts))

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        return {
            _name(number, name): decl
            for number, (form, part, _) in enumerate(self._parts(matrix))
            for name, decl in form.declare(part).items()
        }

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        found: dict[str, Fill] = {}
        for number, (form, part, first) in enumerate(self._parts(matrix)):
            by = tuple(first if axis == self.axis else 0 for axis in range(len(matrix.shape)))
            own = form.fills(part, elements.moved(by))
            found |= {_name(number, name): fill for name, fill in own.items()}
        return found

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        found: dict[str, jax.Array] = {}
        for number, (form, rows) in enumerate(
            zip(self._forms, jnp.split(matrix, self._starts, self.axis), strict=True)
        ):
            own = form.keep(rows, _of_part(shardings, number))
            found |= {_name(number, name): array for name, array in own.items()}
        return found

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        own = enumerate(self._forms)
        return self._joined([form.product(x, _of_part(arrays, number), dtype, is_slice) for number, form in own])

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        return self._joined(
            [
                form.product_with_one(x, [_of_part(arrays, number) for arrays in matrices], index, dtype)
                for number, form in enumerate(self._forms)
            ]
        )

    def product_in_stack(
        self, x: jax.Array, stack: Arrays, number: jax.Array | int, dtype: DTypeLike | None = None
    ) -> jax.Array:
        own = enumerate(self._forms)
        return self._joined([form.product_in_stack(x, _of_part(stack, part), number, dtype) for part, form in own])

    @property
    def _forms(self) -> list[FewBits]:
        return [form for _, form in self.parts]

    @property
    def _starts(self) -> list[int]:
        """The places of all parts but the first."""
        return list(accumulate(size for size, _ in self.parts[:-1]))

    def _parts(self, matrix: ParamDecl) -> Iterator[tuple[FewBits, ParamDecl, int]]:
        """Yields the form of each part, its declaration, and where it begins."""
        for (size, form), first in zip(self.parts, [0, *self._starts], strict=True):
            shape = tuple(size if axis == self.axis else length for axis, length in enumerate(matrix.shape))
            yield form, replace(matrix, shape=shape, heads=None), first

    def _joined(self, products: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate(products, axis=self.axis + 1)


def _name(number: int, name: str) -> str:
    return f"{number}.{name}"


def _of_part[Value](values: Mapping[str, Value], number: int) -> dict[str, Value]:
    """Returns what belongs to a part, by the names that its form has given."""
    start = _name(number, "")
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
