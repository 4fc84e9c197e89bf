"""`jaxvllm bench kernels`, as a user types it, on small cases."""

import json
import re

import jax
import pytest

from jaxvllm.bench.kernels import ceilings, inputs, measure, timing
from jaxvllm.bench.kernels.contender import LayerOutcome
from jaxvllm.bench.kernels.measure import KernelBenchmark, KernelOptions
from jaxvllm.bench.kernels.paged import PagedContender
from jaxvllm.bench.kernels.timing import Timing
from jaxvllm.cli.bench import main
from pallas_kernels.backend import Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.ragged_paged_attention.cases import CASES, RaggedCase, RowCase

pytestmark = pytest.mark.usefixtures("quick_programs")

TINY = tuple(
    RaggedCase(name, 4, 2, 16, 16, 3, (RowCase(1, 40), RowCase(1, 16), RowCase(1, 7)))
    for name in ("decode-tiny", "decode-tiny-q32-d128")
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CASES", TINY)
    monkeypatch.setattr(inputs, "MAX_LAYERS", 2)
    monkeypatch.setattr(timing, "SAMPLES", 2)
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 64})
    monkeypatch.setattr(ceilings, "cache_bytes", lambda device: 2**16)


def test_the_error_comes_first_and_then_the_time(capsys, tmp_path):
    path = tmp_path / "kernels.json"
    assert main(["kernels", "--cases", "^decode-tiny$", "--output-json", str(path)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert re.match(r"cpu: copies [\d.e+]+ GB/s, multiplies float32 at [\d.e-]+ TFLOP/s", heading)
    assert [line.split(":")[0] for line in lines] == ["decode-tiny"]
    told = (
        r"reference: error \d\.\de[+-]\d\d, \d+\.\d us a layer \(\d+% of the (copy|matmul) ceiling\); at best \d+\.\d"
    )
    assert re.search(told, lines[0]), lines
    result = json.loads(path.read_text())
    assert result["versions"]["jax"] == jax.__version__ and result["cases_not_measured"] == []
    contenders = result["results"][0]["contenders"]
    assert list(contenders) == ["ours (cpu)", "reference"]
    for contender in contenders.values():
        assert contender["error"] < 1e-3 and len(contender["seconds_a_layer"]) == 2


def test_our_kernels_stand_before_the_reference(capsys, monkeypatch):
    outcome = LayerOutcome(Timing((3e-6, 2e-6, 4e-6)), 0.001)
    monkeypatch.setattr(PagedContender, "run", lambda *_: outcome)
    assert main(["kernels", "--attention-backend", "interpret", "--cases", "^decode-tiny$"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    told = r"error 1.0e-03, 3.0 us a layer \(\d+% of the (copy|matmul) ceiling\)"
    assert re.match(rf"decode-tiny: ours \(tpu\): {told}; reference: {told}; at best", line)


def test_what_is_wrong_is_not_timed_and_fails(capsys, monkeypatch):
    monkeypatch.setattr(
        PagedContender, "run", lambda *_: LayerOutcome.without("error 1.0e+00 is above 1e-03: not timed", 1.0)
    )
    assert main(["kernels", "--cases", "^decode-tiny$"]) == 1
    assert "reference: error 1.0e+00, not timed: error 1.0e+00 is above" in capsys.readouterr().out


def test_an_exception_in_one_case_does_not_hide_the_others(capsys, monkeypatch):
    def fail(self: PagedContender, case: object, dtype: object) -> LayerOutcome:
        raise RuntimeError("out of memory\nand much more")

    monkeypatch.setattr(PagedContender, "run", fail)
    assert main(["kernels", "--cases", "^decode-tiny"]) == 1
    out = capsys.readouterr().out
    assert out.count("no error known, not timed: RuntimeError: out of memory; at best") == 2


def test_no_case_starts_when_the_minutes_are_over(capsys):
    assert main(["kernels", "--minutes", "0"]) == 0
    out = capsys.readouterr().out
    assert f"0 minutes are over: {len(measure.KernelOptions().chosen)} cases are not measured" in out


@pytest.mark.parametrize(
    ("pattern", "message"), [("nothing-like-it", "is found in no case's name"), ("(", "is no regular expression")]
)
def test_cases_that_there_are_not(capsys, pattern, message):
    assert main(["kernels", "--cases", pattern]) == 2
    assert message in capsys.readouterr().err


def test_only_cases_that_a_gpu_has_a_kernel_for_are_measured_with_it():
    benchmark = KernelBenchmark(KernelOptions("^decode-tiny$"))
    latents, heads = (
        next(case for case in CASES if (case.latent_size is None) == is_plain) for is_plain in (False, True)
    )
    for chip, names in (("l4", ["reference"]), ("h200", ["ours (gpu)", "reference"])):
        backend = Backend.of_chip(chip_named(chip))
        assert [one.name for one in benchmark._contenders(latents, backend)] == names
        assert [one.name for one in benchmark._contenders(heads, backend)] == ["ours (gpu)", "reference"]
