"""Pipeline parallelism: the layers of a step are divided among stages, which compute parts of the step at once.

A step's tokens are cut into microbatches. In each tick a stage computes its layers for one of them and passes the
result on to the next stage (GPipe, arXiv 1811.06965). All stages run one program. Embedding, head and sampler are on
every stage, so that nothing but activations crosses from stage to stage.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxvllm.core.step_sizes import STEP_OVERHEAD
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.axis import ONE_STAGE, ModelAxis, StageAxis


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model, and `overhead`, what a step costs beside its tokens, in tokens: see `StepSizes`."""

    stages: StageAxis = ONE_STAGE
    overhead: int = STEP_OVERHEAD

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
        return min(counts, key=lambda count: (count + self.stages.size - 1) * (self.overhead + num_tokens / count))

    def run[Kv](
        self,
        layers: Callable[[jax.Array, RaggedRows, Kv], tuple[jax.Array, Kv]],
        x: jax.Array,
        rows: RaggedRows,
        kv: Kv,
        axis: ModelAxis,
    ) -> tuple[jax.Array, Kv]:
        """Returns x [T, E] after the layers of all stages, on each of them, and the cache of this stage's layers.

        layers: computes this stage's layers for a part of x and of the rows, and writes their keys and values
        axis: the devices of a stage, which have the same x
        A row's tokens pass a stage in their order, so each finds the keys and values of those before it.
        """
        count = self.num_microbatches(len(x), len(rows.kv_lens))
        size, stage, last = len(x) // count, self.stages.index, self.stages.size - 1

        def tick(now: jax.Array, carry: tuple[jax.Array, jax.Array, Kv]) -> tuple[jax.Array, jax.Array, Kv]:
            arrived, done, kv = carry
            number = now - stage
            # A stage that has nothing to do yet, or no more, computes padding: collectives within a stage need all.
            first = jnp.where((number >= 0) & (number < count), number * size, len(x))
            own = jax.lax.dynamic_slice_in_dim(x, now * size, size)
            with jax.named_scope("stage"):
                y, kv = layers(jnp.where(stage == 0, own, arrived), rows.part(first, size), kv)
            arrived = self.stages.pass_on(y, axis)
            # What the last stage has computed arrives in the first. Before there is any, the place of the first
            # microbatch is filled with anything.
            finished = jnp.where(stage == last, y, arrived)
            done = jax.lax.dynamic_update_slice_in_dim(done, finished, (now - last) * size, axis=0)
            return arrived, done, kv

        begin = jnp.zeros((size, *x.shape[1:]), x.dtype), jnp.zeros_like(x), kv
        _, done, kv = jax.lax.fori_loop(0, count + last, tick, begin)
        for hop in range(1, last):
            done = jnp.where(stage == hop, self.stages.pass_on(done, axis), done)
        return done, kv


NO_PIPELINE = Pipeline()
