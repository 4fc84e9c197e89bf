"""What XLA says about the compiled step: pages and state in place, and no copy of them or of a weight."""

import os
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.cpu_kernel import CpuKernel
from jaxvllm.models.forms.form import Form
from jaxvllm.models.forms.packed import Packed
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.forms.scaled_rows import CpuInt8
from jaxvllm.models.forms.turned import Turned
from jaxvllm.models.kv_scales import with_kv_scales
from jaxvllm.models.params import Layout, abstract_params, head_of
from jaxvllm.runtime.batch import packed_size
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.memory import GPU_SHARE_VARIABLE, claim_gpu_memory, free_bytes, pages_that_fit, step_bytes
from jaxvllm.runtime.proposers.ngram import NgramProposer
from jaxvllm.runtime.proposers.suffix import SuffixProposer
from jaxvllm.runtime.state import state_bytes
from jaxvllm.runtime.step import forward
from jaxvllm.runtime.step_model import StepModel
from jaxvllm.runtime.step_program import StepCompiler, StepProgram
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.quantized_matmul.code import UINT4
from pallas_kernels.ragged_paged_attention import KVQuantization
from sharding.placement import mesh_of
from tests.models.changed import in_windows

pytestmark = pytest.mark.usefixtures("quick_programs")

# Chosen so that activations are small beside any matrix of a layer, and those small beside the pages:
# a copy of either cannot hide. Only shapes: nothing of this is ever allocated.
SPEC = model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 1024,
    }
)
SHAPE = CacheShape(
    num_pages=2048, page_size=16, num_slots=8, max_pages=64, dtype=jnp.dtype(jnp.float32), step_tokens=64
)
MESH = mesh_of(jax.devices()[0])
KV = SHAPE.pages(SPEC, REFERENCE, MESH)
KV_BYTES = sum(pages.size * pages.dtype.itemsize for pages in KV)  # 128 MiB
STATE = SHAPE.state(SPEC, MESH)
STATE_BYTES = state_bytes(SHAPE.sizes(SPEC))
DECODE, BURST, MIXED = Bucket(2, 2), Bucket(2, 2, width=8), Bucket(64, 2)
DRAFTS = Bucket(8, 2, width=8, num_drafts=3)


def params_of(layout: Layout) -> Any:
    return abstract_params(SPEC, jnp.float32, layout, MESH)


def smallest_matrix(layout: Layout) -> int:
    """Bytes of the smallest matrix that a layer multiplies by: `o`, 4 MiB."""
    layer = params_of("separate")["layers"][0]
    return min(leaf.size * leaf.dtype.itemsize for leaf in layer.values() if leaf.ndim > 1)


@cache
def program(bucket: Bucket, layout: Layout) -> StepProgram:
    shape, proposer = replace(SHAPE, has_drafts=True), NgramProposer(2, 5)
    return StepCompiler(params_of(layout), KV, SPEC, shape, REFERENCE, MESH, proposer=proposer).compile(bucket)


def compiled(bucket: Bucket, layout: Layout) -> jax.stages.Compiled:
    """The program that has the layers."""
    return program(bucket, layout).begin


@pytest.mark.parametrize("bucket", [DECODE, BURST, pytest.param(DRAFTS, marks=pytest.mark.slow), MIXED], ids=repr)
def test_pages_and_state_are_updated_in_place(bucket: Bucket) -> None:
    memory = compiled(bucket, "separate").memory_analysis()
    assert memory.alias_size_in_bytes >= KV_BYTES + STATE_BYTES
    # What comes back beyond that is a few numbers a row. In a decode bucket a row has so many for each step, in a mixed
    # one its hidden state for the sampler, and each token has its own for readouts.
    hidden = 0 if bucket.is_decode else 4 * SPEC.hidden_size * (bucket.num_rows + bucket.num_tokens)
    rest = memory.output_size_in_bytes - memory.alias_size_in_bytes - hidden
    assert rest < 1024 * bucket.num_rows * bucket.row_tokens


@pytest.mark.parametrize("bucket", [pytest.param(DRAFTS, marks=pytest.mark.slow), MIXED], ids=repr)
def test_the_index_of_suffixes_is_updated_in_place(bucket: Bucket) -> None:
    # So many slots that the index, 4 MiB, is larger than all temporaries of a step: 2 MiB with drafts, and 3.6 MiB.
    shape, proposer = replace(SHAPE, num_slots=256, has_index=True, has_drafts=True), SuffixProposer(24, 1.0)
    compiler = StepCompiler(params_of("separate"), KV, SPEC, shape, REFERENCE, MESH, proposer=proposer)
    memory, sizes = compiler.compile_begin(bucket).memory_analysis(), shape.sizes(SPEC)
    assert memory is not None and memory.alias_size_in_bytes >= KV_BYTES + state_bytes(sizes)
    assert memory.temp_size_in_bytes < state_bytes(sizes) - state_bytes(replace(sizes, has_index=False))


def test_the_sampler_updates_the_state_in_place() -> None:
    sample = program(MIXED, "separate").sample
    assert sample is not None
    memory = sample.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= STATE_BYTES
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024 * MIXED.num_rows


@pytest.mark.parametrize("bucket", [DECODE, BURST, pytest.param(DRAFTS, marks=pytest.mark.slow), MIXED], ids=repr)
def test_no_copy_of_the_pages(bucket: Bucket) -> None:
    assert compiled(bucket, "separate").memory_analysis().temp_size_in_bytes < KV_BYTES / 10


@pytest.mark.parametrize(
    ("quantization", "backend"),
    [
        (KVQuantization("float8_e4m3fn"), REFERENCE),
        pytest.param(KVQuantization("float8_e5m2"), Backend("cpu", host_chip()), marks=pytest.mark.slow),
        (KVQuantization("int8", by_token=True), Backend("cpu", host_chip())),
    ],
    ids=["e4m3", "e5m2", "int8-by-token"],
)
def test_no_copy_of_pages_in_eight_bits(quantization: KVQuantization, backend: Backend) -> None:
    shape, spec = replace(SHAPE, quantization=quantization), SPEC if quantization.by_token else with_kv_scales(SPEC)
    kv = shape.pages(spec, backend, MESH)
    pages, *_ = jax.tree.leaves(kv)
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kv))
    assert pages.dtype.itemsize == 1 and num_bytes < KV_BYTES / 3.5
    params = abstract_params(spec, jnp.float32, "separate", MESH)
    memory = StepCompiler(params, kv, spec, shape, backend, MESH).compile(MIXED).begin.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes + STATE_BYTES
    assert memory.temp_size_in_bytes < pages.size / 8  # those of one layer are half


def test_no_copy_of_a_weight() -> None:
    assert compiled(DECODE, "separate").memory_analysis().temp_size_in_bytes < smallest_matrix("separate")
    assert compiled(BURST, "separate").memory_analysis().temp_size_in_bytes < smallest_matrix("separate")
    assert compiled(DRAFTS, "separate").memory_analysis().temp_size_in_bytes < smallest_matrix("separate")
    assert step_bytes(compiled(DECODE, "separate")) < smallest_matrix("separate")


def test_no_copy_of_a_weight_where_layers_follow_a_period() -> None:
    # A loop over two periods of a run and a layer, and a run after it.
    spec = in_windows(SPEC, *(64, 64, None) * 2, 64, 64)
    kv, params = SHAPE.pages(spec, REFERENCE, MESH), abstract_params(spec, jnp.float32, "separate", MESH)
    memory = StepCompiler(params, kv, spec, SHAPE, REFERENCE, MESH).compile(BURST).begin.memory_analysis()
    # Two groups, each in place: of layers that see all, and of layers with a window.
    full, windowed = (pages.size * pages.dtype.itemsize for pages in kv)
    assert full == KV_BYTES and windowed > 2 * smallest_matrix("separate")
    assert memory.alias_size_in_bytes >= full + windowed + STATE_BYTES
    assert memory.temp_size_in_bytes < smallest_matrix("separate")


def test_no_copy_of_a_weight_that_was_turned_round() -> None:
    forms = Forms(layers=Turned(), outside=Turned(), head=Turned())
    params = abstract_params(SPEC, jnp.float32, "separate", MESH, forms)
    turned = StepCompiler(params, KV, SPEC, SHAPE, REFERENCE, MESH).compile(DECODE)
    assert turned.step_bytes < smallest_matrix("separate")


@pytest.mark.parametrize(
    "form", [CpuInt8(host_chip()), FewBitsForms(Backend("cpu", host_chip())).named("int4")], ids=["int8", "int4"]
)
def test_no_copy_of_integers_in_another_dtype(form: Form) -> None:
    usual = Packed(host_chip(), "float32")
    forms = Forms(layers=form, outside=usual, head=usual)
    params = abstract_params(SPEC, jnp.float32, "separate", MESH, forms)
    kernels = StepCompiler(params, KV, SPEC, SHAPE, REFERENCE, MESH).compile(DECODE)
    assert kernels.step_bytes < smallest_matrix("separate")


def test_groups_are_decoded_a_tile_at_a_time() -> None:
    kernel = CpuKernel(host_chip())
    forms = Forms(layers=ScaledGroups(UINT4, 128, "bfloat16"), outside=kernel, head=kernel)
    params = abstract_params(SPEC, jnp.float32, "separate", MESH, forms)
    groups = StepCompiler(params, KV, SPEC, SHAPE, REFERENCE, MESH).compile(DECODE)
    assert groups.step_bytes < smallest_matrix("separate")


@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_no_stack_of_experts_is_copied(layout: Layout) -> None:
    # Sixteen experts, of which one has 4 and 2 MiB in two matrices: the smaller stack of a layer has 32.
    experts = ExpertsFfn(1024, 512, ExpertRouter(1024, 16, 2))
    spec = replace(SPEC, layers=tuple(replace(layer, ffn=experts) for layer in SPEC.layers))
    kernel = Packed(host_chip(), "float32")
    forms = PLAIN_FORMS
    if layout == "separate":
        forms = Forms(layers=kernel, outside=kernel, head=kernel, experts=kernel)
    params = abstract_params(spec, jnp.float32, layout, MESH, forms)
    assert StepCompiler(params, KV, spec, SHAPE, REFERENCE, MESH).compile(DECODE).step_bytes < 32 * 2**20


def test_a_copy_of_weights_would_be_seen() -> None:
    # The layout of the accelerators, whose scan makes XLA on CPU copy each layer's weights: why there are two.
    assert compiled(DECODE, "stacked").memory_analysis().temp_size_in_bytes > smallest_matrix("stacked")


def test_a_copy_of_the_pages_would_be_seen() -> None:
    # The same step without donation.
    packed = jax.ShapeDtypeStruct((packed_size(MIXED, SHAPE.sizes(SPEC)),), jnp.int32)
    program = jax.jit(partial(forward, model=StepModel(SPEC, SHAPE, REFERENCE), bucket=MIXED))
    careless = program.lower(params_of("separate"), KV, STATE, packed).compile()
    assert careless.memory_analysis().alias_size_in_bytes == 0
    assert step_bytes(careless) >= KV_BYTES


@pytest.mark.parametrize(("layout", "per_layer", "rest"), [("separate", 6, 17), ("stacked", 0, 23)])
def test_a_step_takes_few_arguments(layout: Layout, per_layer: int, rest: int) -> None:
    # sglang-jax measured 34 ms a step for 2,600 arguments. Here 6 a layer on CPU, none a layer on accelerators.
    # The rest: 3 weights outside the layers, 1 KV, 12 of the state, 1 batch; and a stacked layer's 6.
    assert len(jax.tree.leaves((params_of(layout), KV, STATE, 0))) == per_layer * SPEC.num_layers + rest
    assert len(head_of(params_of(layout))) == 2  # all that the sampler takes of the weights


def test_pages_that_fit() -> None:
    assert pages_that_fit(1000, lambda count: 100 * count, useful=50) == 10
    assert pages_that_fit(1099, lambda count: 100 * count, useful=50) == 10
    assert pages_that_fit(10_000, lambda count: 100 * count, useful=50) == 50


@pytest.mark.parametrize("room", [199, 0, -5])
def test_too_little_memory_is_refused(room: int) -> None:
    with pytest.raises(ValueError, match="left for KV pages.*raise memory_utilization"):
        pages_that_fit(room, lambda count: 100 * count, useful=50)


@pytest.mark.parametrize(
    ("platform", "share", "limit", "free"),
    [
        ("tpu", None, 1000, 900 - 100),
        ("gpu", "0.950", 950, 900 - 100),  # JAX has 950 of 1000, and `memory_utilization` is of all
        ("gpu", "0.5", 500, 475 - 100),  # the user gave JAX less: all of that, but for what keeps pieces from failing
    ],
)
def test_the_room_that_devices_have(
    platform: str, share: str | None, limit: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if share is None:
        monkeypatch.delenv(GPU_SHARE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(GPU_SHARE_VARIABLE, share)
    stats = {"bytes_limit": limit, "bytes_in_use": 100}
    device: Any = SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    assert free_bytes(device, 0.9) == free


def test_jax_may_have_more_than_pages_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_SHARE_VARIABLE, "0.5")
    claim_gpu_memory(0.9)
    assert os.environ[GPU_SHARE_VARIABLE] == "0.5"
    monkeypatch.delenv(GPU_SHARE_VARIABLE)
    claim_gpu_memory(0.9)
    assert os.environ[GPU_SHARE_VARIABLE] == "0.950"
