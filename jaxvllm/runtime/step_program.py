"""Step programs: the step of a bucket, compiled ahead of time for the devices of a mesh."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.core.step_plan import SCORE_BATCH
from jaxvllm.core.step_sizes import step_overhead
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.batch import packed_size
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape, KVCachePages
from jaxvllm.runtime.decoding import decode
from jaxvllm.runtime.forks import fork_slots, pack_forks
from jaxvllm.runtime.memory import step_bytes
from jaxvllm.runtime.pipeline import Pipeline
from jaxvllm.runtime.prompt_scores import PromptScores
from jaxvllm.runtime.proposers import Proposer
from jaxvllm.runtime.recipe import Recipe
from jaxvllm.runtime.sampler import DEFAULT_OPTIONS, DeviceLogprobs, SamplerOptions
from jaxvllm.runtime.slot_fields import DeviceState
from jaxvllm.runtime.step import (
    Unsampled,
    distribute,
    forward,
    pick_rows,
    pick_tokens,
    sample_rows,
    score_widely,
)
from jaxvllm.runtime.step_model import DeviceOutput, StepModel
from pallas_kernels.backend import Backend
from sharding.axis import ModelAxis, StageAxis
from sharding.rules import MODEL, STAGE

# Rows whose distributions one program yields: 5 MB with 152k tokens of vocabulary.
DISTRIBUTION_BATCH = 8


@dataclass(frozen=True)
class DistributionProgram:
    """The compiled way to the distributions of some rows. The second part, the large one, is the same for all buckets.

    Rows are picked first, so that it does not depend on how many the step has.
    """

    pick: jax.stages.Compiled
    compute: jax.stages.Compiled

    def __call__(self, params: Params, state: DeviceState, unsampled: Unsampled, index: Any) -> jax.Array:
        """Returns the distributions f32[DISTRIBUTION_BATCH, V] of the rows `index`, which are not sampled yet."""
        result: jax.Array = self.compute(head_of(params), state, self.pick(unsampled, index))
        return result


@dataclass(frozen=True)
class WideScoreProgram:
    """The compiled way to the wide scores of some tokens, in two parts as `DistributionProgram` is."""

    pick: jax.stages.Compiled
    compute: jax.stages.Compiled

    def __call__(self, params: Params, hidden: jax.Array, packed: Any) -> DeviceLogprobs:
        """Returns the wide scores of the tokens that `pack_wide` names, SCORE_BATCH at most."""
        result: DeviceLogprobs = self.compute(head_of(params), *self.pick(hidden, packed))
        return result


@dataclass(frozen=True)
class StepProgram:
    """The compiled step of a bucket: one program for decode rows, and two where prompts are computed.

    `begin` is `decoding.decode`, which does all, or `step.forward`, to be followed by `sample`.
    """

    begin: jax.stages.Compiled
    sample: jax.stages.Compiled | None = None
    distributions: Callable[[], DistributionProgram] | None = None  # compiled when it is called first; before `sample`
    wide_scores: WideScoreProgram | None = None  # the same, if requests may want them

    @property
    def parts(self) -> tuple[jax.stages.Compiled, ...]:
        """The programs in the order in which they run."""
        scores = None if self.wide_scores is None else self.wide_scores.compute
        return tuple(part for part in (self.begin, scores, self.sample) if part is not None)

    @property
    def step_bytes(self) -> int:
        """Bytes that a call needs beyond its arguments, as XLA reports them."""
        return max(step_bytes(part) for part in self.parts)

    def __call__(
        self, params: Params, kv_pages: KVCachePages, state: DeviceState, packed: Any
    ) -> tuple[KVCachePages, DeviceState, DeviceOutput, PromptScores | None]:
        """Dispatches the whole step, whose last result only a bucket for prompts has. Donates `kv_pages`, `state`."""
        if self.sample is None:
            return (*self.begin(params, kv_pages, state, packed), None)
        kv_pages, state, unsampled, scores = self.begin(params, kv_pages, state, packed)
        return kv_pages, *self.finish(params, state, unsampled), scores

    def finish(self, params: Params, state: DeviceState, unsampled: Unsampled) -> tuple[DeviceState, DeviceOutput]:
        """Dispatches the second half. Donates `state`."""
        assert self.sample is not None, "a decode bucket samples in the same program"
        result: tuple[DeviceState, DeviceOutput] = self.sample(head_of(params), state, unsampled)
        return result


def head_of(params: Params) -> Params:
    """Returns the parameters that `project_logits` reads, without the hundreds of arrays of the layers."""
    return {name: params[name] for name in ("embed", "lm_head") if name in params}


@dataclass(frozen=True)
class StepCompiler:
    """Compiles the steps of one model over one KV cache; `params` and `kv` may be arrays or their abstract shapes.

    `make` makes a program of its recipe.
    """

    params: Params
    kv: Any
    spec: ModelSpec
    shape: CacheShape
    backend: Backend
    mesh: Mesh
    sampling: SamplerOptions = DEFAULT_OPTIONS
    make: Callable[[Recipe], jax.stages.Compiled] = Recipe.compile
    proposer: Proposer | None = None
    _samplers: dict[int, jax.stages.Compiled] = field(default_factory=dict)
    _distributions: dict[int, Callable[[], DistributionProgram]] = field(default_factory=dict)
    _wide_scores: dict[int, WideScoreProgram] = field(default_factory=dict)

    def compile(self, bucket: Bucket) -> StepProgram:
        """Compiles the step of `bucket`. Sampling depends only on the number of rows, and is compiled once for each."""
        if bucket.is_decode:
            return StepProgram(self.compile_begin(bucket))
        # Both at once: compilers run outside of Python's lock. A cold start took 4.2 s and not 4.6 (2 cores).
        with ThreadPoolExecutor(1) as other:
            begin_later = other.submit(self.compile_begin, bucket)
            if bucket.num_rows not in self._samplers:
                self._samplers[bucket.num_rows] = self.compile_sampler(bucket.num_rows)
                self._distributions[bucket.num_rows] = cache(partial(self._compile_distributions, bucket.num_rows))
            begin = begin_later.result()
        if bucket.is_split:  # a row has asked for it that may want distributions in the step at hand
            self._distributions[bucket.num_rows]()
        if self.sampling.has_wide_scores and bucket.num_tokens not in self._wide_scores:
            self._wide_scores[bucket.num_tokens] = self._compile_wide_scores(bucket.num_tokens)
        return StepProgram(
            begin,
            self._samplers[bucket.num_rows],
            self._distributions[bucket.num_rows],
            self._wide_scores.get(bucket.num_tokens),
        )

    def compile_begin(self, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles `StepProgram.begin` of `bucket`."""
        run = partial(decode if bucket.is_decode else forward, bucket=bucket)
        if self.proposer is not None and (bucket.num_drafts or self._follows(bucket)):
            run = partial(run, proposer=self.proposer)
        packed = self._everywhere((packed_size(bucket, self.shape.sizes(self.spec)),), jnp.int32)
        arguments = (self.params, self.kv, self._state, packed)
        outputs = (PartitionSpec(),) * (2 if bucket.is_decode else 3)
        pages = jax.tree.map(lambda x: x.sharding.spec, self.kv)
        return self._make(run, arguments, (pages, *outputs), donates=(1, 2))

    def _follows(self, bucket: Bucket) -> bool:
        """Returns whether the proposer follows the steps of a bucket without drafts."""
        if bucket.is_blind or self.proposer is None or self.proposer.cache is None:
            return False
        return self.proposer.follows_all or not bucket.is_decode

    def compile_sampler(self, num_rows: int) -> jax.stages.Compiled:
        """Compiles `StepProgram.sample` for every bucket that has `num_rows` and computes prompts."""
        arguments = (head_of(self.params), self._state, self._unsampled(num_rows))
        return self._make(sample_rows, arguments, (PartitionSpec(), PartitionSpec()), donates=(1,))

    def compile_distributions(self) -> None:
        """Compiles `StepProgram.distributions` of every bucket that was compiled."""
        for compile_it in self._distributions.values():
            compile_it()

    def compile_fork(self) -> jax.stages.Compiled:
        """Compiles `forks.fork_slots`, which only beam search needs. It donates pages and state."""
        sizes = self.shape.sizes(self.spec)
        packed = pack_forks((), sizes)
        arguments = (self.kv, self._state, self._everywhere(packed.shape, packed.dtype))
        where = jax.tree.map(lambda x: x.sharding, arguments[:2])
        run = partial(fork_slots, sizes=sizes)
        return self.make(Recipe(run, arguments, self.mesh, donates=(0, 1), out_shardings=where))

    def _compile_distributions(self, num_rows: int) -> DistributionProgram:
        index = self._everywhere((DISTRIBUTION_BATCH,), jnp.int32)
        pick = Recipe(pick_rows, (self._unsampled(num_rows), index), self.mesh)
        return DistributionProgram(self.make(pick), self._distribute)

    @cached_property
    def _distribute(self) -> jax.stages.Compiled:
        arguments = (head_of(self.params), self._state, self._unsampled(DISTRIBUTION_BATCH))
        return self._make(distribute, arguments, PartitionSpec(), donates=())

    def _compile_wide_scores(self, num_tokens: int) -> WideScoreProgram:
        packed = self._everywhere((2, SCORE_BATCH), jnp.int32)
        pick = Recipe(pick_tokens, (self._hidden(num_tokens), packed), self.mesh)
        return WideScoreProgram(self.make(pick), self._score_widely)

    @cached_property
    def _score_widely(self) -> jax.stages.Compiled:
        token_ids = self._everywhere((SCORE_BATCH,), jnp.int32)
        arguments = (head_of(self.params), self._hidden(SCORE_BATCH), token_ids)
        return self._make(score_widely, arguments, PartitionSpec(), donates=())

    def _unsampled(self, num_rows: int) -> Unsampled:
        numbers = self._everywhere((num_rows,), jnp.int32)
        return Unsampled(self._hidden(num_rows), numbers, numbers)

    def _hidden(self, count: int) -> Any:
        return self._everywhere((count, self.spec.hidden_size), self.params["embed"].dtype)

    def _make(
        self, run: Callable[..., Any], arguments: tuple[Any, ...], out_specs: Any, donates: tuple[int, ...]
    ) -> jax.stages.Compiled:
        axis, stages = ModelAxis(self.mesh.shape[MODEL]), StageAxis(self.mesh.shape[STAGE])
        pipeline = Pipeline(stages, step_overhead(on_cpu=self.mesh.devices.flat[0].platform == "cpu"))
        model = StepModel(self.spec, self.shape.of_programs(self.spec), self.backend, axis, self.sampling, pipeline)
        on_parts = out_specs if self.mesh.size > 1 else None
        return self.make(Recipe(partial(run, model=model), arguments, self.mesh, donates, on_parts))

    @property
    def _state(self) -> DeviceState:
        return self.shape.state(self.spec, self.mesh)

    def _everywhere(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array that every device has whole."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, PartitionSpec()))
