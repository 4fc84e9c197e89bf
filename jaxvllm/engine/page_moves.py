"""Pages between a runner's pool and the form in which they are kept and travel: on the host, or on the devices."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.core.page_pool import TRASH_PAGE
from jaxvllm.core.step_plan import Ints
from jaxvllm.kv_transfer.page_format import Page, PageFormat
from jaxvllm.runtime.page_copies import COPY_BATCH, PageContents
from jaxvllm.runtime.plan_runner import PlanRunner
from jaxvllm.runtime.runner import Runner


class PageMoves(Protocol):
    """Takes pages out of the pool of a runner, and puts others into it. `columns` are i32[N] of each group."""

    def copy(self, columns: Sequence[Ints]) -> list[PageContents]:
        """Copies pages after all steps that were dispatched, for `read`. It does not wait."""

    def read(self, columns: Sequence[Ints], copies: Sequence[PageContents]) -> Iterator[Page]:
        """Yields the pages that `copy` copied. It may wait for the device."""

    def write(self, columns: Sequence[Ints], pages: Sequence[Page]) -> int:
        """Fills the first of `columns` with as many of `pages` as have all that is needed, and returns how many.

        It does not wait.
        """


class HostMoves:
    """Pages on the host, in the form that is the same for all meshes."""

    def __init__(self, runner: PlanRunner, form: PageFormat):
        self._runner = runner
        self._format = form

    def copy(self, columns: Sequence[Ints]) -> list[PageContents]:
        copies = self._runner.take_pages(columns)
        for contents in copies:
            for array in contents:
                array.copy_to_host_async()
        return copies

    def read(self, columns: Sequence[Ints], copies: Sequence[PageContents]) -> Iterator[Page]:
        for batch, contents in enumerate(copies):
            arrays = [np.asarray(array) for array in contents]
            for place, held in _held_places(self._format, columns, batch):
                found = zip(arrays, held, strict=True)
                yield self._format.page(tuple(array[place] if is_held else None for array, is_held in found))

    def write(self, columns: Sequence[Ints], pages: Sequence[Page]) -> int:
        count = _num_whole(self._format, columns, pages)
        if count:
            held = [self._format.held(page) for page in pages[:count]]
            contents = [np.stack(of_array) for of_array in zip(*held, strict=True)]
            self._runner.put_pages([of_group[:count] for of_group in columns], contents)
        return count


class DeviceMoves:
    """Pages that stay on the devices, as the pool has them."""

    def __init__(self, runner: Runner, form: PageFormat):
        self._runner = runner
        self._format = form
        self._split = jax.jit(lambda contents: tuple(tuple(x[place] for x in contents) for place in range(COPY_BATCH)))
        like = jax.tree.map(lambda x: x.sharding, runner.contents_like)
        self._join = jax.jit(lambda pages: tuple(map(jnp.stack, zip(*pages, strict=True))), out_shardings=like)
        self._nothing = [jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for x in runner.page_like]

    def copy(self, columns: Sequence[Ints]) -> list[PageContents]:
        return self._runner.take_pages(columns)

    def read(self, columns: Sequence[Ints], copies: Sequence[PageContents]) -> Iterator[Page]:
        for batch, contents in enumerate(copies):
            pages = self._split(contents)
            for place, held in _held_places(self._format, columns, batch):
                found = zip(pages[place], held, strict=True)
                yield Page(tuple(array if is_held else None for array, is_held in found))

    def write(self, columns: Sequence[Ints], pages: Sequence[Page]) -> int:
        count = _num_whole(self._format, columns, pages)
        for first in range(0, count, COPY_BATCH):
            some = [self._filled(page) for page in pages[first : min(first + COPY_BATCH, count)]]
            at = [of_group[first : first + len(some)] for of_group in columns]
            some += [tuple(self._nothing)] * (COPY_BATCH - len(some))
            self._runner.put_contents(at, self._join(some))
        return count

    def _filled(self, page: Page) -> PageContents:
        found = zip(page.arrays, self._nothing, strict=True)
        return tuple(nothing if array is None else jnp.asarray(array) for array, nothing in found)


def _held_places(form: PageFormat, columns: Sequence[Ints], batch: int) -> Iterator[tuple[int, list[bool]]]:
    """Yields the places of a batch of copies that mean something, and which arrays have a page there."""
    first = batch * COPY_BATCH
    for place in range(min(COPY_BATCH, len(columns[0]) - first)):
        yield place, [bool(columns[of.group][first + place] != TRASH_PAGE) for of in form.arrays]


def _num_whole(form: PageFormat, columns: Sequence[Ints], pages: Sequence[Page]) -> int:
    """Returns how many of the first `pages` have everything that the pool wants of them."""
    for index, page in enumerate(pages):
        for of, array in zip(form.arrays, page.arrays, strict=True):
            if array is None and columns[of.group][index] != TRASH_PAGE:
                return index
    return len(pages)
