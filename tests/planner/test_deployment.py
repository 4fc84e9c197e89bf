"""A deployment is what an engine of the same options would run."""

import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.models.forms import PLAIN
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.known_models import find_config
from jaxvllm.runtime.buckets import Bucket
from pallas_kernels.backend import Backend
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.ragged_paged_attention import KVQuantization
from tests.planner.deployments import TINY, deployment


def test_what_is_left_open_is_as_in_the_engine():
    on_chip = deployment("Llama-3.1-8B", "v5e", mesh="2x8")
    on_cpu = deployment("Llama-3.1-8B", "cpu", attention_backend="reference")
    assert (on_chip.replicas, on_chip.size, on_chip.dtype, on_chip.kv_quantization) == (2, 8, "bfloat16", None)
    assert (on_chip.largest, on_chip.decode) == (Bucket(2048, 256), Bucket(256, 256))
    assert (on_cpu.dtype, on_cpu.largest, on_cpu.decode) == ("float32", Bucket(512, 64), Bucket(64, 64))
    assert deployment(TINY, "v5e", max_num_seqs=4000).max_num_batched_tokens == 4000
    assert deployment(TINY, "v5e", max_num_batched_tokens=16).max_num_seqs == 16
    assert deployment(TINY, "v5e", kv_cache_dtype="fp8").kv_quantization == KVQuantization("float8_e4m3fn")
    assert on_chip.max_pages == 131072 // 16
    assert deployment(TINY, "v5e", max_model_len=33, page_size=32).max_pages == 2
    assert deployment(TINY, "v5e", max_model_len=33, page_size=32, max_num_seqs=3).useful_pages == 7


def test_jobs_survive_the_pipe():
    given = deployment("gemma-3-27b", "h200", mesh="1x4", kv_cache_dtype="fp8", max_model_len=1000)
    assert Deployment.from_json(given.to_json()) == given


@pytest.mark.parametrize("device", ["v5e", "v7x", "h200", "b200", "l4", "t4"])
def test_kernels_run_where_there_are_any(device):
    assert deployment("Llama-3.1-8B", device).attention.kind in ("tpu", "gpu")


def test_the_reference_runs_elsewhere():
    assert deployment("Llama-3.1-8B", "cpu").attention.kind == "reference"
    assert deployment("DeepSeek-V3", "l4", mesh="1x16").attention.kind == "reference", "it has no kernel for latents"
    assert deployment("Llama-3.1-8B", "h200", dtype="float32").attention.kind == "reference"


def test_a_t4_computes_in_float16():
    assert (deployment("Llama-3.1-8B", "t4").dtype, deployment("Llama-3.1-8B", "l4").dtype) == ("float16", "bfloat16")
    assert deployment("gemma-3-4b-it", "t4").dtype == "float32", "its hidden states are beyond float16"
    assert deployment("Llama-3.1-8B", "t4", dtype="bfloat16").backend.kind == "reference"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": "1x3"}, "an FFN of size 14336 does not divide over 3 devices: use a mesh of 1x1, 1x2, 1x4"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens 32 must be at least"),
        ({"max_model_len": 200_000}, "exceeds the 131072 positions"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        deployment("Llama-3.1-8B", "v5e", **options)


def test_a_device_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="'v9x': known are v5e, .*, l4, .*, t4 and cpu"):
        deployment("Llama-3.1-8B", "v9x")


@pytest.mark.parametrize(
    ("device", "mesh", "backend", "is_apart"),
    [
        ("v6e", "64x1", None, True),
        ("v6e", "2x4", None, False),
        ("h200", "64x1", None, False),
        ("h200", "2x4", "ragged_all_to_all", True),
        ("v6e", "64x1", "allgather_reducescatter", False),
    ],
)
def test_the_plan_takes_the_way_to_experts_that_an_engine_would(device, mesh, backend, is_apart):
    options = {"mesh": mesh, "enable_expert_parallel": True, "all2all_backend": backend}
    planned = deployment("Qwen3-30B-A3B", device, **options)
    assert {layer.ffn.sends_apart for layer in Deployment.from_json(planned.to_json()).spec.layers} == {is_apart}


@pytest.mark.parametrize(
    ("device", "mesh", "kept"),
    [
        ("v6e", "1x1", {"experts_gate_up", "experts_down"}),
        # 2,880 inputs of a down projection are 360 on each of eight devices, in groups of eight, which no kernel takes.
        ("v6e", "1x8", {"experts_gate_up"}),
        # Here zeros fill up what no kernel takes on two devices, and groups of eight are decoded as well.
        ("h200", "1x2", {"experts_gate_up", "experts_down"}),
        ("h200", "1x8", {"experts_gate_up"}),
    ],
)
def test_a_plan_keeps_the_bits_that_an_engine_would(device, mesh, kept):
    config = find_config("gpt-oss-20b")[1] | {"quantization_config": {"quant_method": "mxfp4"}}
    assert {name for name, _ in deployment(config, device, mesh=mesh).forms.own} == kept


@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_for_one_cpu_keeps_the_head_as_an_engine_does(tied):
    # The head has 4 MiB in float32, and the layers next to nothing.
    config = TINY | {"vocab_size": 4096, "hidden_size": 256, "tie_word_embeddings": tied}
    plain, rounded, two = (
        deployment(config, "cpu", dtype="float32", quantization=quantization, mesh=mesh)
        for quantization, mesh in ((None, "1x1"), ("int4", "1x1"), ("int4", "1x2"))
    )
    resolved = ResolvedConfig.of(EngineConfig(dtype="float32", quantization="int4"), config, "cpu")
    forms = resolved.forms(Backend("cpu", host_chip()), 1, 1)
    assert (rounded.forms.head, rounded.forms.table) == (forms.head, forms.table)
    assert plain.share.weight_bytes - rounded.share.weight_bytes > 2.5 * 2**20
    assert two.forms.head == two.forms.table == PLAIN
