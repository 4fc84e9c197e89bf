"""The benchmark of attention: what it times, what it refuses to time, and what comes first."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.report import CaseResult, Goal, markdown
from benchmarks.kernels.session import GOALS_FIRST, agreeing, chosen, measure
from benchmarks.peers import attention_gather
from jaxvllm.bench.kernels import inputs, paged
from jaxvllm.bench.kernels.ceilings import Ceilings
from jaxvllm.bench.kernels.contender import LayerOutcome
from jaxvllm.bench.kernels.counts import Work
from jaxvllm.bench.kernels.inputs import Inputs
from jaxvllm.bench.kernels.paged import OurAttention, PagedContender
from jaxvllm.bench.kernels.timing import Timing
from pallas_kernels.backend import REFERENCE
from pallas_kernels.ragged_paged_attention import RaggedRows
from pallas_kernels.ragged_paged_attention.cases import SERVING, RaggedCase, RowCase

pytestmark = pytest.mark.usefixtures("quick_programs")

FLOAT32 = jnp.dtype(jnp.float32)
CASE = RaggedCase("decode", 4, 2, 16, 16, 3, (RowCase(1, 40), RowCase(1, 16), RowCase(1, 7)))
PROMPT = RaggedCase("prompt", 4, 2, 16, 16, 20, (RowCase(20, 20),))


def attend(inputs: Inputs, kv_pages: jax.Array, layer: jax.Array | int, rows: RaggedRows) -> tuple:
    return OurAttention(REFERENCE)(inputs, kv_pages, layer, rows)


def attend_values_for_keys(inputs: Inputs, kv_pages: jax.Array, layer: jax.Array | int, rows: RaggedRows) -> tuple:
    return attention_gather.attend(replace(inputs, k=inputs.v, v=inputs.k), kv_pages, layer, rows)


def attend_never(*_: object) -> tuple:
    raise RuntimeError("out of luck\nand much more")


def contender(attend: paged.AttendLayer) -> PagedContender:
    return PagedContender("contender", attend, REFERENCE, jax.devices()[0])


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_LAYERS", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "attention"), [(CASE, attend), (CASE, attention_gather.attend), (PROMPT, attention_gather.attend)]
)
def test_times_what_is_right(case: RaggedCase, attention: paged.AttendLayer) -> None:
    outcome = contender(attention).run(case, FLOAT32)
    assert outcome.problem is None
    assert outcome.error is not None and outcome.error < 1e-5
    assert outcome.timing is not None and outcome.timing.best > 0
    assert outcome.details["layers_a_call"] == 3
    assert outcome.outputs is not None and outcome.outputs.shape == (case.num_tokens, 4, 16)


def test_does_not_time_what_is_wrong() -> None:
    outcome = contender(attend_values_for_keys).run(CASE, FLOAT32)
    assert outcome.timing is None
    assert outcome.problem is not None and "not timed" in outcome.problem


def test_slow_contenders_do_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "CALL_SECONDS", 0.0)
    outcome = contender(attention_gather.attend).run(CASE, FLOAT32)
    assert outcome.timing is not None
    assert outcome.details["layers_a_call"] == 1
    monkeypatch.setattr(paged, "LAYER_SECONDS", 0.0)
    assert "not repeated" in (contender(attention_gather.attend).run(CASE, FLOAT32).problem or "")


def test_every_contender_ends_on_the_same_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else outputs at full size could not be compared: one did three layers, one a single one."""
    whole = contender(attention_gather.attend).run(CASE, FLOAT32)
    monkeypatch.setattr(paged, "CALL_SECONDS", 0.0)
    np.testing.assert_array_equal(whole.outputs, contender(attention_gather.attend).run(CASE, FLOAT32).outputs)


@pytest.mark.slow
def test_a_crash_is_an_outcome() -> None:
    outcomes = dict(measure(CASE, FLOAT32, [contender(attend_never)]))
    assert outcomes["contender"].problem == "RuntimeError: out of luck"


def test_another_result_than_the_reference_at_full_size_fails() -> None:
    ones = np.ones((2, 4, 16), np.float32)
    right = LayerOutcome(Timing((1.0,)), 0.0, outputs=ones)
    wrong = replace(right, outputs=ones * 1.1)
    assert agreeing({"ours": right, "reference": right}, FLOAT32)["ours"].timing
    outcome = agreeing({"ours": wrong, "reference": right}, FLOAT32)["ours"]
    assert outcome.timing is None
    assert outcome.problem == "differs from the reference by 1.0e-01 at full size"


def test_cases_with_goals_come_first() -> None:
    names = [case.name for case in chosen(None)]
    assert tuple(names[: len(GOALS_FIRST)]) == GOALS_FIRST
    assert sorted(names) == sorted(case.name for case in SERVING)
    assert [case.name for case in chosen("decode-fp8|prefill-2048-q32-d128")] == ["prefill-2048-q32-d128", "decode-fp8"]


def test_goals_are_those_of_the_issue() -> None:
    asked = {case.name: Goal.of(case) for case in SERVING}
    decode = {f"decode-{size}-q32-d128" for size in ("64x4096", "256x4096", "8x32768", "64x32768", "256x32768")}
    prefill = {"prefill-2048-q32-d128", "prefill-8192-q32-d128"}
    assert {name for name, goal in asked.items() if goal == Goal(0.90, "copy")} == decode
    assert {name for name, goal in asked.items() if goal == Goal(0.65, "matmul")} == prefill


def test_the_table_judges_by_the_measured_ceilings() -> None:
    case = next(case for case in SERVING if case.name == GOALS_FIRST[0])
    work = Work.of(case, np.dtype(np.float16))
    ceilings = Ceilings(copy=1e12, matmul=1e15)
    for share, verdict in ((0.91, "pass (91% of copy, goal 90%)"), (0.89, "FAIL (89% of copy, goal 90%)")):
        ours = LayerOutcome(Timing((work.bytes / 1e12 / share,)), 0.0)
        table = markdown([CaseResult(case, work, ceilings, {"ours": ours, "peer": LayerOutcome.without("no GPU")})])
        assert f"{share:.0%} of copy" in table
        assert verdict in table
        assert "- peer, every case: no GPU" in table
