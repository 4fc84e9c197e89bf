"""The step in stages: its microbatches, what stages send each other, and that each keeps to its share of memory."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.params import abstract_params
from jaxvllm.planner.hlo import read_collectives
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.pipeline import Pipeline
from jaxvllm.runtime.step_program import StepCompiler
from pallas_kernels.backend import REFERENCE
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.axis import StageAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.changed import in_windows
from tests.models.test_spread import DEMO
from tests.runtime.test_sharded_step import DECODE, MIXED, OF_MIN_TOKENS, SHAPE

pytestmark = pytest.mark.usefixtures("quick_programs")

SPEC = in_windows(DEMO, *[None] * 4)
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
    parts = [rows.part(jnp.int32(first), size) for first in range(0, num_tokens, size)]
    assert [token for part in parts for token in computed(part)] == computed(rows)
    for part in (*parts, nothing := rows.part(jnp.int32(num_tokens), size)):
        assert part.decode_only == rows.decode_only and len(part.positions) == size
        assert (np.asarray(part.query_lens()) > 0).sum() <= len(computed(part))
    assert not computed(nothing) and not nothing.query_lens().any()


def compiled(mesh: MeshShape, bucket: Bucket) -> jax.stages.Compiled:
    devices = make_mesh(mesh, jax.devices())
    params = abstract_params(SPEC, jnp.float32, "stacked", devices)
    pages = SHAPE.pages(SPEC, REFERENCE, devices)
    return StepCompiler(params, pages, SPEC, SHAPE, REFERENCE, devices).compile_begin(bucket)


@pytest.mark.parametrize(("bucket", "ticks"), [(DECODE, 2), pytest.param(MIXED, 3, marks=pytest.mark.slow)], ids=str)
def test_stages_send_each_other_activations_alone(bucket: Bucket, ticks: int) -> None:
    text = compiled(MeshShape(data=1, model=2, stages=2), bucket).as_text()
    assert text is not None
    counts: Counter[str] = Counter()
    for one in read_collectives(text):
        counts[one.kind] += one.count
    assert counts["collective-permute"] == ticks, "one a tick, and the first stage has what the last has computed"
    # Two all-reduces for each layer of a stage in each tick, and one for the embedding.
    of_decode = OF_MIN_TOKENS if bucket.is_decode else 0
    assert counts["all-reduce"] - of_decode == 2 * ticks * SPEC.num_layers // 2 + 1
    assert set(OVER.findall(text)) == {"{'model'}"} and len(OVER.findall(text)) == text.count("replica_groups=")


def test_each_stage_updates_its_layers_of_the_pages_in_place() -> None:
    mesh = MeshShape(data=1, model=1, stages=4)
    program = compiled(mesh, DECODE)
    [pages] = SHAPE.pages(SPEC, REFERENCE, make_mesh(mesh, jax.devices()))
    share = pages.size * pages.dtype.itemsize // 4
    assert pages.sharding.shard_shape(pages.shape)[0] == 1, "one layer of four"
    memory = program.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= share
    assert memory.temp_size_in_bytes < share
