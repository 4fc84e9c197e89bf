"""What an engine is where its config leaves that open."""

from typing import Any, get_args

import pytest

from jaxvllm import EngineConfig
from jaxvllm.config import KVCacheDtype
from jaxvllm.engine.kv_cache_dtype import QUANTIZATIONS
from jaxvllm.engine.resolved_config import ResolvedConfig
from pallas_kernels.backend import Backend
from pallas_kernels.chips import CHIPS, CpuChip
from pallas_kernels.ragged_paged_attention import KVQuantization
from pallas_kernels.ragged_paged_attention.quantize import Codes
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
    assert made.dtype.name == dtype and made.kv_quantization is None


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
        (cpu("+avx2,+fma,+avx512f,+amx-tile,+amx-bf16"), "bfloat16", {}, "bfloat16"),
        (cpu("+avx2,+fma,+amx-tile,+amx-bf16"), "bfloat16", {}, "float32"),
        (cpu("+neon,+bf16"), "bfloat16", {}, "float32"),
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
    assert made.dtype.name == dtype and made.kv_quantization is None


def test_tpus_have_no_float16() -> None:
    with pytest.raises(ValueError, match="TPUs have no float16: set dtype to bfloat16 or auto"):
        resolved("tpu", dtype="float16")


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}


def test_keys_and_values_in_eight_bits() -> None:
    assert resolved("gpu", kv_cache_dtype="fp8").kv_quantization == KVQuantization("float8_e4m3fn")
    assert resolved("tpu", kv_cache_dtype="fp8_e5m2").kv_quantization == KVQuantization("float8_e5m2")
    assert resolved("cpu", kv_cache_dtype="int8_per_token_head").kv_quantization == KVQuantization("int8", True)
    assert resolved("gpu", kv_cache_dtype="bfloat16").kv_quantization is None
    with pytest.raises(ValueError, match="the dtype of the model, which is bfloat16, or one of fp8"):
        resolved("gpu", kv_cache_dtype="float16")
    with pytest.raises(ValueError, match="int8 needs a checkpoint whose kv_cache_scheme is int8"):
        resolved("cpu", kv_cache_dtype="int8")
    assert set(QUANTIZATIONS) <= set(get_args(KVCacheDtype))


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        (COMPRESSED | {"kv_cache_scheme": SCHEME}, "float8_e4m3fn"),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, "float8_e4m3fn"),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"type": "int"}}, "int8"),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"num_bits": 4}}, None),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"type": ["int"]}}, None),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"symmetric": False}}, None),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"dynamic": True}}, None),
        (COMPRESSED | {"kv_cache_scheme": None}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "float8_e4m3fn"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, None),
    ],
)
def test_auto_is_what_the_checkpoint_was_calibrated_for(settings: dict[str, Any], codes: Codes | None) -> None:
    config = LLAMA | {"torch_dtype": "bfloat16", "quantization_config": settings}
    made = ResolvedConfig.of(EngineConfig(), config, "gpu")
    assert made.kv_quantization == (None if codes is None else KVQuantization(codes))
    # The model has the scales in all of its layers, and none where nothing is divided by them.
    assert all(layer.attention.has_kv_scales is (codes is not None) for layer in made.spec.layers)
    plain = ResolvedConfig.of(EngineConfig(kv_cache_dtype="bfloat16"), config, "gpu")
    assert plain.kv_quantization is None and not plain.spec.layers[0].attention.has_kv_scales


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


def test_a_draft_is_whole_on_each_device_of_a_mesh() -> None:
    made, backend = resolved("gpu"), Backend("gpu", CHIPS["h100"])
    of_model, of_draft = made.forms(backend, 2, shards=2).stored, made.draft_forms(backend, 2).stored
    assert of_model is not None and of_model.shards == 2
    assert of_draft is not None and of_draft.shards == 1


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
