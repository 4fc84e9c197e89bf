"""The step in stages: its microbatches, what stages send each other, and that each keeps to its share of memory."""

import re
from collections import Counter
from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.families import model_spec
from jaxvllm.models.params import abstract_params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.planner.hlo import read_collectives
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.pipeline import Pipeline
from jaxvllm.runtime.recipe import Recipe
from jaxvllm.runtime.step_program import StepCompiler
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.axis import StageAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.changed import in_windows
from tests.models.test_layer_loops import first_dense
from tests.models.test_spread import DEMO
from tests.models.test_tpu_states import QWEN
from tests.runtime.test_sharded_step import DECODE, MIXED, OF_MIN_TOKENS, SHAPE

pytestmark = pytest.mark.usefixtures("quick_programs")

SPEC = in_windows(DEMO, *[None] * 4)
# Three layers in one stage of two, of which the first is of another kind, and two in the other.
UNLIKE = first_dense(1, 4)
ON_TWO = MeshShape(data=1, model=2, stages=2)
# The axes of the mesh over which a collective goes that is no collective-permute.
OVER = re.compile(r"replica_groups=mesh\[[^\]]*\] (\{[^}]*\})")


@pytest.mark.parametrize(
    ("stages", "tokens", "rows", "count"),
    [
        (2, 64, 64, 1),  # all of a stage's weights for 32 rows would be read three times and not twice
        (2, 256, 256, 1),
        (2, 1024, 1024, 2),
        (2, 2048, 256, 2),  # 3 ticks of 1024 + 256 take 3840, and 2 of 2048 + 256 take 4608
        (4, 2048, 64, 4),
        (4, 8192, 64, 8),
        (8, 2048, 512, 2),  # a microbatch with prompts has more tokens than rows
        (2, 17, 4, 1),
    ],
)
def test_as_many_microbatches_as_take_the_least_time(stages: int, tokens: int, rows: int, count: int) -> None:
    assert Pipeline(StageAxis(stages), overhead=256).num_microbatches(tokens, rows) == count


def rows_of(starts: list[int], lengths: list[int], num_tokens: int) -> RaggedRows:
    table = jnp.arange(3 * len(starts), dtype=jnp.int32).reshape(-1, 3)
    return RaggedRows.build(table, jnp.array(starts, jnp.int32), jnp.array(lengths, jnp.int32), num_tokens)


def computed(rows: RaggedRows) -> list[tuple[list[int], int, int]]:
    """For each token that is not padding: its row's pages, its position, and the keys that its row has by then."""
    found = []
    real, starts = np.asarray(rows.is_real()), np.asarray(rows.query_starts)
    for token, row in enumerate(np.asarray(rows.token_rows)):
        if real[token]:
            behind = starts[row + 1] - 1 - token  # queries of its row after it
            keys = int(rows.kv_lens[row]) - behind
            found.append((np.asarray(rows.page_table[row]).tolist(), int(rows.positions[token]), keys))
    return found


@pytest.mark.parametrize(
    ("starts", "lengths", "num_tokens", "size"),
    [
        ([3, 0, 7], [1, 9, 20], 32, 8),  # rows that begin and end within parts, and one that is in three
        ([0, 4, 0], [16, 0, 0], 32, 16),  # an empty part, and rows without a token
        ([5, 0, 8, 2], [1, 0, 1, 1], 4, 2),  # rows that decode, and one that is over
        ([5, 0, 8, 2], [1, 0, 1, 1], 4, 4),
    ],
)
def test_parts_of_rows_compute_what_the_rows_do(
    starts: list[int], lengths: list[int], num_tokens: int, size: int
) -> None:
    rows = rows_of(starts, lengths, num_tokens)
    parts = [rows.part(jnp.int32(first), jnp.int32(first + size), size) for first in range(0, num_tokens, size)]
    assert [token for part in parts for token in computed(part)] == computed(rows)
    end = jnp.int32(num_tokens)
    for part in (*parts, nothing := rows.part(end, end, size)):
        assert part.decode_only == rows.decode_only and len(part.positions) == size
        assert (np.asarray(part.query_lens()) > 0).sum() <= len(computed(part))
    assert not computed(nothing) and not nothing.query_lens().any()


@pytest.mark.parametrize(
    ("starts", "lengths", "count"),
    [([3, 0, 7], [1, 9, 20], 2), ([5, 40], [64, 0], 4), ([0, 0, 13, 2], [3, 17, 11, 1], 4), ([0], [5], 1)],
    ids=str,
)
def test_tokens_that_a_state_takes_in_together_stay_together(starts: list[int], lengths: list[int], count: int) -> None:
    run, num_tokens = 8, 64
    pipeline, rows = Pipeline(StageAxis(2), state_run=run), rows_of(starts, lengths, num_tokens)
    room = pipeline.room(count, num_tokens, len(starts))
    *begins, end, again = np.asarray(pipeline.begins(rows, count)).tolist()
    assert begins == sorted(begins) and len(begins) == count and begins[0] == 0 and end == again == num_tokens
    parts = [rows.part(jnp.int32(a), jnp.int32(b), room) for a, b in pairwise((*begins, end))]
    assert [token for part in parts for token in computed(part)] == computed(rows)
    for part in parts:
        assert len(part.positions) == room
        own = np.asarray(part.query_lens()) > 0
        first = np.asarray(part.starts())[own]
        assert all(start % run == 0 or start in starts for start in first)


def test_microbatches_of_states_count_the_room_that_they_need() -> None:
    plain, states = (Pipeline(StageAxis(2), overhead=5, state_run=run) for run in (1, 16))
    assert (plain.num_microbatches(64, 16), states.num_microbatches(64, 16)) == (2, 1)
    assert (plain.num_microbatches(128, 16), states.num_microbatches(128, 16)) == (4, 2)
    assert states.num_microbatches(16, 16) == plain.num_microbatches(16, 16) == 2, "each row has one token"


def traced(recipe: Recipe) -> Any:
    """The text of a program for several devices, which is not compiled."""
    assert recipe.out_specs is not None
    parts = jax.tree.map(lambda x: x.sharding.spec, recipe.arguments)
    sharded = partial(jax.shard_map, mesh=recipe.mesh, in_specs=parts, out_specs=recipe.out_specs, check_vma=False)
    return str(jax.make_jaxpr(sharded(recipe.run))(*recipe.arguments))


@pytest.mark.parametrize(
    ("bucket", "kernel"),
    [(DECODE, "delta_rule_single"), (MIXED, "delta_rule_chunk"), (Bucket(128, 8), None)],
    ids=["decode", "one microbatch", "two microbatches"],
)
def test_a_prompt_in_two_microbatches_has_no_kernel_for_its_states(bucket: Bucket, kernel: str | None) -> None:
    # Between the two its states are in page 0, which only plain XLA keeps.
    spec, devices = model_spec(QWEN), make_mesh(MeshShape(1, 1, stages=2), jax.devices())
    backend = Backend("tpu", chip_named("v6e"))
    params, pages = abstract_params(spec, jnp.float32, "stacked", devices), SHAPE.pages(spec, backend, devices)
    text: Any = StepCompiler(params, pages, spec, SHAPE, backend, devices, make=traced).compile_begin(bucket)
    assert kernel in text if kernel else "delta_rule" not in text


@cache
def compiled(mesh: MeshShape, bucket: Bucket, spec: ModelSpec) -> jax.stages.Compiled:
    devices = make_mesh(mesh, jax.devices())
    params = abstract_params(spec, jnp.float32, "stacked", devices)
    pages = SHAPE.pages(spec, REFERENCE, devices)
    return StepCompiler(params, pages, spec, SHAPE, REFERENCE, devices).compile_begin(bucket)


@pytest.mark.parametrize(
    ("spec", "bucket", "ticks", "most"),
    [
        (SPEC, DECODE, 2, 2),
        (UNLIKE, DECODE, 2, 3),
        pytest.param(SPEC, MIXED, 3, 2, marks=pytest.mark.slow),
    ],
    ids=["alike", "unlike", "prompts"],
)
def test_stages_send_each_other_activations_alone(spec: ModelSpec, bucket: Bucket, ticks: int, most: int) -> None:
    text = compiled(ON_TWO, bucket, spec).as_text()
    assert text is not None
    counts: Counter[str] = Counter()
    for one in read_collectives(text):
        counts[one.kind] += one.count
    assert counts["collective-permute"] == ticks, "one a tick, and the first stage has what the last has computed"
    # Two all-reduces for each layer of the stage that has `most`, in each tick, and one for the embedding.
    of_decode = OF_MIN_TOKENS if bucket.is_decode else 0
    assert counts["all-reduce"] - of_decode == 2 * ticks * most + 1
    assert set(OVER.findall(text)) == {"{'model'}"} and len(OVER.findall(text)) == text.count("replica_groups=")


@pytest.mark.parametrize(
    ("spec", "mesh", "most"), [(SPEC, MeshShape(1, 1, stages=4), 1), (UNLIKE, ON_TWO, 3)], ids=["alike", "unlike"]
)
def test_each_stage_updates_its_layers_of_the_pages_in_place(spec: ModelSpec, mesh: MeshShape, most: int) -> None:
    program = compiled(mesh, DECODE, spec)
    [pages] = SHAPE.pages(spec, REFERENCE, make_mesh(mesh, jax.devices()))
    share = pages.size * pages.dtype.itemsize // mesh.num_devices
    assert pages.sharding.shard_shape(pages.shape)[0] == most
    memory = program.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= share
    assert memory.temp_size_in_bytes < share
