"""What an engine is where its config leaves that open."""

from typing import Any

import pytest

from jaxvllm import EngineConfig
from jaxvllm.engine.resolved_config import ResolvedConfig
from pallas_kernels.chips import CpuChip
from tests.models.fixture import Fixture

LLAMA = Fixture.load("llama").config


def resolved(platform: str, stated: str = "bfloat16", **options: Any) -> ResolvedConfig:
    return ResolvedConfig.of(EngineConfig(**options), LLAMA | {"torch_dtype": stated}, platform)


@pytest.mark.parametrize(
    ("platform", "stated", "chosen", "dtype"),
    [
        ("gpu", "float16", "auto", "float16"),
        ("gpu", "float16", "bfloat16", "bfloat16"),
        ("tpu", "bfloat16", "auto", "bfloat16"),
        ("tpu", "float16", "auto", "bfloat16"),
        ("tpu", "float16", "float32", "float32"),
        ("cpu", "float16", "auto", "float32"),
        ("cpu", "int8", "auto", "float32"),
        ("cpu", "bfloat16", "float16", "float16"),
    ],
)
def test_the_dtype(platform: str, stated: str, chosen: str, dtype: str) -> None:
    made = resolved(platform, stated, dtype=chosen)
    assert made.dtype.name == made.page_dtype.name == dtype


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_models_that_exceed_float16_are_not_computed_in_it(name: str) -> None:
    stated = Fixture.load(name).config | {"torch_dtype": "float16"}
    assert ResolvedConfig.of(EngineConfig(), stated, "gpu").dtype == "bfloat16"
    with pytest.raises(ValueError, match="are beyond the largest number of float16: set dtype to bfloat16, float32"):
        ResolvedConfig.of(EngineConfig(dtype="float16"), stated, "gpu")


def cpu(features: str) -> CpuChip:
    return CpuChip(name="a CPU", triple="x86_64-unknown-linux-gnu", features=features)


@pytest.mark.parametrize(
    ("chip", "stated", "options", "dtype"),
    [
        (cpu("+avx2,+fma,+avx512bf16"), "bfloat16", {}, "bfloat16"),
        (cpu("+avx2,+fma,+avx512bf16"), "bfloat16", {"attention_backend": "cpu"}, "bfloat16"),
        (cpu("+avx2,+fma,+avx512bf16"), "bfloat16", {"mesh": "2x4"}, "bfloat16"),
        (cpu("+avx2,+fma,+avx512bf16"), "bfloat16", {"attention_backend": "reference"}, "float32"),
        (cpu("+avx2,+fma,+avx512bf16"), "bfloat16", {"attention_backend": "interpret"}, "float32"),
        (cpu("+avx2,+fma,+avx512bf16"), "bfloat16", {"dtype": "float32"}, "float32"),
        (cpu("+avx2,+fma,+avx512bf16"), "float16", {}, "float32"),
        (cpu("+avx2,+fma,+avx512bf16"), "float32", {}, "float32"),
        (cpu("+avx2,+fma,-avx512bf16"), "bfloat16", {}, "float32"),
        (cpu("+avx2,+fma,-avx512bf16"), "bfloat16", {"dtype": "bfloat16"}, "bfloat16"),
        (None, "bfloat16", {}, "float32"),
    ],
)
def test_bfloat16_stays_on_cpus_whose_kernels_multiply_it(
    monkeypatch: pytest.MonkeyPatch, chip: CpuChip | None, stated: str, options: dict[str, Any], dtype: str
) -> None:
    def host_chip() -> CpuChip:
        if chip is None:
            raise NotImplementedError("no kernels")
        return chip

    monkeypatch.setattr("pallas_kernels.cpu.host.host_chip", host_chip)
    made = resolved("cpu", stated, **options)
    assert made.dtype.name == made.page_dtype.name == dtype


def test_tpus_have_no_float16() -> None:
    with pytest.raises(ValueError, match="TPUs have no float16: set dtype to bfloat16 or auto"):
        resolved("tpu", dtype="float16")


def test_pages_in_eight_bits() -> None:
    assert resolved("gpu", kv_cache_dtype="fp8").page_dtype.name == "float8_e4m3fn"
    assert resolved("tpu", kv_cache_dtype="fp8_e5m2").page_dtype.name == "float8_e5m2"


def test_values_of_the_models_config_are_replaced() -> None:
    overrides = '{"max_position_embeddings": 64, "torch_dtype": "float16", "rope_scaling": {"factor": 2.0}}'
    config = EngineConfig(hf_overrides=overrides)
    scaled = LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    made = ResolvedConfig.of(config, scaled, "gpu")
    assert (made.max_model_len, made.dtype.name) == (2 * 64, "float16")
    assert made.hf_config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert EngineConfig(hf_overrides={"a": 1}).hf_overrides == '{"a": 1}'
    with pytest.raises(ValueError, match="architecture 'Other' is not supported"):
        resolved("cpu", hf_overrides='{"architectures": ["Other"]}')


@pytest.mark.parametrize("wrong", ["[]", "{", 5])
def test_overrides_must_be_an_object(wrong: Any) -> None:
    with pytest.raises(ValueError, match="hf_overrides"):
        EngineConfig(hf_overrides=wrong)


def test_limits_make_room_for_each_other() -> None:
    def limits(platform: str, **options: int) -> tuple[int, int]:
        made = resolved(platform, **options)
        return made.max_num_seqs, made.max_num_batched_tokens

    assert limits("cpu") == (64, 512)
    assert limits("gpu") == limits("tpu") == (256, 2048)
    assert limits("cpu", max_num_seqs=1000) == (1000, 1000)
    assert limits("gpu", max_num_batched_tokens=32) == (32, 32)


def test_slots_hold_requests_of_full_length() -> None:
    shape = resolved("cpu", max_model_len=100, page_size=32).cache_shape(num_pages=7)
    assert (shape.num_pages, shape.page_size, shape.num_slots, shape.max_pages) == (7, 32, 64, 4)
