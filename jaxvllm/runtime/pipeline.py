"""Pipeline parallelism: the layers of a step are divided among stages, which compute parts of the step at once.

A step's tokens are cut into microbatches. In each tick a stage computes its layers for one of them and passes the
result on to the next stage (GPipe, arXiv 1811.06965). All stages run one program. Where their layers are not alike, it
has the layers of each, of which a stage runs its own. Embedding, head and sampler are on every stage, so that nothing
but activations crosses from stage to stage.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp

from jaxvllm.core.step_sizes import STEP_OVERHEAD
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.state_memory import longest_run
from jaxvllm.runtime.conditional_loop import run_if
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.axis import ONE_STAGE, ModelAxis, StageAxis


@dataclass(frozen=True)
class OfTokens:
    """Holds what layers know of a step's tokens beside their states and places, where there is anything."""

    embeddings: jax.Array | None = None  # [L, T, P]: what they mean to each layer of the model alone
    adapters: jax.Array | None = None  # i32[T]: the slots of their adapters

    def padded(self, count: int) -> Self:
        """Returns the same with so many tokens more."""
        return self._each(lambda array, axis: jnp.pad(array, [(0, count * (i == axis)) for i in range(array.ndim)]))

    def part(self, first: jax.Array, count: int) -> Self:
        """Returns what is known of `count` tokens."""
        return self._each(lambda array, axis: jax.lax.dynamic_slice_in_dim(array, first, count, axis))

    def _each(self, change: Callable[[jax.Array, int], jax.Array]) -> Self:
        """Changes each array, given the axis of its tokens."""
        embeddings, adapters = self.embeddings, self.adapters
        return replace(
            self,
            embeddings=None if embeddings is None else change(embeddings, 1),
            adapters=None if adapters is None else change(adapters, 0),
        )


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model, and how they divide a step."""

    stages: StageAxis = ONE_STAGE
    overhead: int = STEP_OVERHEAD  # what a step costs beside its tokens, in tokens: see `StepSizes`
    # A microbatch begins with a row, or at a position that is a multiple of this. So the tokens that a state takes in
    # together stay together: other runs would round differently, and tokens could depend on the mesh.
    state_run: int = 1

    @classmethod
    def of(cls, spec: ModelSpec, stages: StageAxis, overhead: int, page_size: int) -> "Pipeline":
        """Returns the pipeline of a model whose pages have so many tokens."""
        keeps_state = any(layer.keeps_state for layer in spec.layers)
        return cls(stages, overhead, longest_run(page_size) if keeps_state else 1)

    def only_on[Carry](self, stages: Collection[int], run: Callable[[Carry], Carry], carry: Carry) -> Carry:
        """Returns `run(carry)` on the devices of `stages`, and `carry` on all others, which compute nothing."""
        if len(stages) == self.stages.size:
            return run(carry)
        return run_if(jnp.any(self.stages.index == jnp.asarray(tuple(stages))), run, carry)

    def num_microbatches(self, num_tokens: int, num_rows: int) -> int:
        """Returns into how many microbatches a step of so many tokens and rows is cut.

        P stages take B + P - 1 ticks for B microbatches, and each tick reads all weights of a stage. So few tokens stay
        together, and many are cut: B has the least cost. A microbatch with prompts has more tokens than rows.
        """
        counts = [
            count
            for count in range(1, num_tokens + 1)
            if num_tokens % count == 0 and (num_tokens == num_rows or num_tokens // count > num_rows)
        ]

        def cost(count: int) -> int:
            return (count + self.stages.size - 1) * (self.overhead + self.room(count, num_tokens, num_rows))

        return min(counts, key=cost)

    def cuts_rows(self, rows: RaggedRows) -> bool:
        """Tells whether a row of a step may go on in the next microbatch.

        Between the two its states are in page 0 alone: the host gives a prompt pages in its last two columns.
        """
        return not rows.decode_only and self.num_microbatches(len(rows.token_rows), len(rows.kv_lens)) > 1

    def room(self, count: int, num_tokens: int, num_rows: int) -> int:
        """Returns how many tokens each of `count` microbatches has room for, which may not begin at any token."""
        return num_tokens // count + (0 if count == 1 or num_tokens == num_rows else self.state_run - 1)

    def compute[Kv](
        self,
        layers: Callable[[jax.Array, OfTokens, RaggedRows, Kv], tuple[jax.Array, Kv]],
        x: jax.Array,
        of_tokens: OfTokens,
        rows: RaggedRows,
        kv: Kv,
        axis: ModelAxis,
        is_whole: bool,
    ) -> tuple[jax.Array, Kv]:
        """Returns x [T, ..] after the layers of all stages, on each of them, and the cache of this stage's layers.

        layers: computes this stage's layers for a part of x, of `of_tokens` and of the rows, and writes their keys and
            values
        of_tokens: what else layers know of the tokens
        axis: the devices of a stage, which have the same x
        is_whole: whether the step must be one microbatch
        A row's tokens pass a stage in their order, so each finds the keys and values of those before it.
        """
        shape = x.shape[1:]
        num_tokens, num_rows = len(x), len(rows.kv_lens)
        count = 1 if is_whole else self.num_microbatches(num_tokens, num_rows)
        size, begins = self.room(count, num_tokens, num_rows), self.begins(rows, count)
        stage, last = self.stages.index, self.stages.size - 1
        more = size - num_tokens // count
        x = jnp.pad(x.reshape(num_tokens, -1), ((0, more), (0, 0)))
        of_tokens = of_tokens.padded(more)

        def tick(now: jax.Array, carry: tuple[jax.Array, jax.Array, Kv]) -> tuple[jax.Array, jax.Array, Kv]:
            arrived, done, kv = carry
            number = now - stage
            # A stage that has nothing to do yet, or no more, computes padding: collectives within a stage need all.
            number = jnp.where((number >= 0) & (number < count), number, count)
            first, end = begins[number], begins[number + 1]
            own = jnp.where(stage == 0, jax.lax.dynamic_slice_in_dim(x, first, size), arrived)
            with jax.named_scope("stage"):
                part = of_tokens.part(first, size), rows.part(first, end, size)
                y, kv = layers(own.reshape(size, *shape), *part, kv)
            y = y.reshape(size, -1)
            arrived = self.stages.pass_on(y, axis)
            # What the last stage has computed arrives in the first. Before there is any, the place of the first
            # microbatch is filled with anything.
            finished = jnp.where(stage == last, y, arrived)
            # The next one overwrites what is too much.
            at = begins[jnp.maximum(now - last, 0)]
            return arrived, jax.lax.dynamic_update_slice_in_dim(done, finished, at, axis=0), kv

        begin = jnp.zeros((size, *x.shape[1:]), x.dtype), jnp.zeros_like(x), kv
        _, done, kv = jax.lax.fori_loop(0, count + last, tick, begin)
        for hop in range(1, last):
            done = jnp.where(stage == hop, self.stages.pass_on(done, axis), done)
        return done[:num_tokens].reshape(num_tokens, *shape), kv

    def begins(self, rows: RaggedRows, count: int) -> jax.Array:
        """Returns the first token of each of `count` microbatches, i32[count + 2], and twice the end of the last."""
        num_tokens = len(rows.token_rows)
        even = jnp.arange(count) * (num_tokens // count)
        if not rows.decode_only:
            begins = even - rows.positions[even] % self.state_run
            even = jnp.maximum(begins, rows.query_starts[rows.token_rows[even]])
        return jnp.append(even, jnp.full(2, num_tokens)).astype(jnp.int32)


NO_PIPELINE = Pipeline()
