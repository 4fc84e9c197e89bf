"""The step on a mesh: what devices send each other, and that each keeps to its share of memory."""

import re
from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxvllm.core.readout import SCORES
from jaxvllm.models.experts import by_expert, num_experts
from jaxvllm.models.families import model_spec
from jaxvllm.models.params import Layout, abstract_params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.planner.hlo import read_collectives
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.step_program import StepCompiler, StepProgram
from pallas_kernels.backend import REFERENCE
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.changed import changed, in_windows
from tests.models.fixture import Fixture
from tests.models.test_spread import DEMO

pytestmark = pytest.mark.usefixtures("quick_programs")

# Only where a row has min_tokens: whether masks leave it anything but its stop ids.
OF_MIN_TOKENS = 1
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(")
DECODE, MIXED = Bucket(8, 8), Bucket(40, 8)
SPEC = in_windows(DEMO, None, None)
SHAPE = CacheShape(
    num_pages=1024, page_size=16, num_slots=8, max_pages=16, dtype=jnp.dtype(jnp.float32), step_tokens=64
)


def compiled_on(size: int, bucket: Bucket = DECODE, layout: Layout = "separate", spec: ModelSpec = SPEC) -> StepProgram:
    return _compiled_on(size, bucket, layout, spec)


@cache  # which tells what is given from a default
def _compiled_on(size: int, bucket: Bucket, layout: Layout, spec: ModelSpec) -> StepProgram:
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    params = abstract_params(spec, jnp.float32, layout, mesh)
    return StepCompiler(params, SHAPE.pages(spec, REFERENCE, mesh), spec, SHAPE, REFERENCE, mesh).compile(bucket)


def texts(program: StepProgram) -> list[str]:
    """The texts of the programs of a step, with the one that scores prompts."""
    score: Any = program.readouts.get(SCORES.name)
    parts = program.parts if score is None else (*program.parts, score().compute)
    return [text for part in parts if (text := part.as_text())]


def collectives(program: StepProgram) -> Counter[str]:
    """How many there are in the program's text."""
    return Counter(COLLECTIVE.findall("".join(texts(program))))


def met_in_a_run(program: StepProgram) -> Counter[str]:
    """How many one run of the program meets, those in a loop as often as it turns."""
    counts: Counter[str] = Counter()
    for text in texts(program):
        for collective in read_collectives(text):
            counts[collective.kind] += collective.count
    return counts


@pytest.mark.parametrize("bucket", [DECODE, MIXED], ids=str)
def test_two_all_reduces_a_layer(bucket: Bucket) -> None:
    found = met_in_a_run(compiled_on(2, bucket))
    # One more for the embedding; one all-gather for the greedy tokens. Only where a row wants it: to draw, one
    # all-to-all and an all-gather; for log-probabilities one and four, and as many for those of a prompt.
    asked = 1 if bucket.is_decode else 2
    assert found == {
        "all-reduce": 2 * SPEC.num_layers + 1 + OF_MIN_TOKENS,
        "all-gather": 1 + 1 + 4 * asked,
        "all-to-all": 1 + asked,
    }


def test_a_scan_holds_them_once() -> None:
    assert collectives(compiled_on(4, layout="stacked"))["all-reduce"] == 2 + 1 + OF_MIN_TOKENS


@pytest.mark.parametrize("layout", [pytest.param("separate", marks=pytest.mark.slow), "stacked"])
def test_layers_in_periods_send_no_more(layout: Layout) -> None:
    spec = in_windows(SPEC, *(8, None) * 2, 8)
    assert (
        met_in_a_run(compiled_on(2, layout=layout, spec=spec))["all-reduce"] == 2 * spec.num_layers + 1 + OF_MIN_TOKENS
    )


def test_norms_over_all_heads_cost_one_more() -> None:
    # Queries' and keys' are small, and XLA makes them one.
    spec = changed(SPEC, {"qk_norm": "full"})
    assert met_in_a_run(compiled_on(2, spec=spec))["all-reduce"] == 3 * SPEC.num_layers + 1 + OF_MIN_TOKENS


def test_one_device_sends_nothing() -> None:
    assert not collectives(compiled_on(1))


def test_no_device_has_the_logits_of_the_batch() -> None:
    text = "".join(texts(compiled_on(2, MIXED)))
    tokens, rows, vocab = MIXED.num_tokens, MIXED.num_rows, SPEC.vocab_size
    assert f"f32[{rows},{vocab // 2}]" in text and f"f32[{rows // 2},{vocab}]" in text
    assert f"f32[{rows},{vocab}]" not in text
    # Nor of a prompt that is scored.
    assert f"f32[{tokens // 2},{vocab}]" in text and f"f32[{tokens},{vocab}]" not in text


# Four devices have copies of the two KV heads.
@pytest.mark.parametrize(("size", "layout"), [(2, "separate"), (4, "stacked")])
def test_each_device_updates_its_share_of_the_pages_in_place(size: int, layout: Layout) -> None:
    program = compiled_on(size, layout=layout)
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    [pages] = SHAPE.pages(SPEC, REFERENCE, mesh)
    share = pages.size * pages.dtype.itemsize // size
    memory = program.begin.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= share
    assert program.step_bytes < share


def test_replicas_gather_tokens_for_experts_and_sum_once() -> None:
    config = Fixture.load("qwen2_moe").config | {"num_experts": 8}
    spec = by_expert(model_spec(config, None), num_replicas=2)
    mesh = make_mesh(MeshShape(2, 2), jax.devices())
    params = abstract_params(spec, jnp.float32, "separate", mesh)
    program = StepCompiler(params, SHAPE.pages(spec, REFERENCE, mesh), spec, SHAPE, REFERENCE, mesh).compile(DECODE)
    counts: Counter[tuple[str, str]] = Counter()
    for collective in read_collectives("".join(texts(program))):
        counts[collective.kind, collective.over] += collective.count
    num_layers = len(num_experts(spec))
    # The hidden states, and one with the experts that they have chosen.
    assert counts["all-gather", "data"] == 2 * num_layers
    assert counts["reduce-scatter", "data"] == num_layers
    assert {kind for kind, over in counts if over == "data"} == {"all-gather", "reduce-scatter"}
    assert counts["all-reduce", "model"] == 2 * spec.num_layers + 1 + OF_MIN_TOKENS
    assert {over for _, over in counts} == {"data", "model"}
