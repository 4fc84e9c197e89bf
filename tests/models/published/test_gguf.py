"""GGUF files make the models that the same numbers in a Hugging Face checkpoint make."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from jaxvllm import LLM, SamplingParams
from jaxvllm.gguf_file import GgufFile, GgufTensor
from jaxvllm.model_name import DEMO_MODEL
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.published import gguf_blocks
from jaxvllm.models.published.gguf_blocks import BlockType
from jaxvllm.models.published.gguf_tensors import GgufTensors, values_of
from jaxvllm.models.tiling import Box
from jaxvllm.text.tokenizer import Tokenizer
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.gguf_cases import add_granite_hybrid
from tests.gguf_files import demo_tokenizer, gpt_oss_in_file, gpt_oss_of_file, sized, write_gguf
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture
from tests.models.published.written import resized, write_model
from tests.quick import quick_engines

KINDS = (Kind.Q4_0, Kind.Q8_0, Kind.F16, Kind.BF16, Kind.Q5_1)
SIZES = {48: 64, 100: 96}
# The rows of keys of heads of 12, which have 16 then.
HEADS = {24: 32}
# The rows of queries and keys of heads of 20, which have 16 then.
KEYS = {80: 64, 40: 32, 20: 16}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
STEEP = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
HALF = {"partial_rotary_factor": 0.5}
SCALING = "llama.rope.scaling"
EMBEDDING = {"token_embd.weight": np.zeros((64, 48), np.float32)}  # all that a config needs of the tensors


def mixed(name: str) -> Kind:
    return KINDS[sum(name.encode()) % len(KINDS)]


def load(path: Path, size: int = 1) -> Any:
    config = checkpoint.read_config(path)
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    return checkpoint.load(path, model_spec(config), dtype=jnp.float32, layout="separate", mesh=mesh)


@pytest.mark.parametrize(
    ("name", "sizes", "changes", "device_count"),
    [
        ("llama-bias", HEADS, {"hidden_act": "silu"}, 2),
        ("qwen2", HEADS, {"use_sliding_window": False}, 1),
        ("qwen3", {}, {}, 1),
        ("qwen3_moe", HEADS, {"moe_intermediate_size": 32, "mlp_only_layers": []}, 2),
        ("mixtral", HEADS, {"intermediate_size": 32, "sliding_window": None}, 1),
        ("gemma2", {}, {"query_pre_attn_scalar": 16}, 1),
        ("gemma3", {}, {"query_pre_attn_scalar": 16}, 1),
        ("phi3", {96: 128, 200: 192}, {}, 1),
        ("arcee", KEYS, {"head_dim": 16}, 1),
        ("dots1", {**HEADS, 12: 16}, {"moe_intermediate_size": 32, "sliding_window": None}, 1),
        ("minimax_m2", HEADS, {"intermediate_size": 32, "head_dim": 16, "rotary_dim": 8, **HALF}, 1),
        ("olmoe", HEADS, {"intermediate_size": 32}, 1),
        ("ernie4_5", KEYS, {"head_dim": 16}, 1),
        ("glm4", {**KEYS, 200: 192}, {"head_dim": 16, "partial_rotary_factor": 0.5}, 1),
        ("glm4_moe", HEADS, {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5}, 2),
        ("granite", HEADS, {}, 1),
        ("hunyuan", KEYS, {"head_dim": 16, "rope_parameters": None}, 1),
        ("olmo2", HEADS, {}, 1),
        ("olmo3", HEADS, {"rope_parameters": YARN}, 1),
        ("gemma", KEYS, {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}, 1),
        ("cohere-plus", {48: 96, 16: 32, 8: 16}, {"hidden_size": 96, "layer_norm_eps": 1e-5}, 1),
        ("cohere2", HEADS, {"sliding_window_pattern": 4, "layer_norm_eps": 1e-5}, 1),
        ("nemotron", KEYS, {"head_dim": 16, **HALF}, 1),
        ("ministral3", KEYS, {"head_dim": 16, "rope_parameters": STEEP}, 1),
        ("exaone4", {**HEADS, 12: 16}, {"sliding_window_pattern": 4}, 1),
        ("starcoder2", HEADS, {"sliding_window": 4096}, 1),
        ("seed_oss", KEYS, {"head_dim": 16}, 1),
        ("smollm3", HEADS, {"no_rope_layer_interval": 4}, 1),
    ],
)
def test_a_file_is_the_same_model_as_its_checkpoint(
    name: str, sizes: dict[int, int], changes: dict[str, Any], device_count: int, tmp_path: Path
) -> None:
    fixture = Fixture.load(name)
    if "mlp_only_layers" in changes:  # all layers have experts in files
        shapes = {key: shape for key, shape in fixture.shapes.items() if ".1.mlp." not in key}
        shapes |= {key.replace(".0.mlp.", ".1.mlp."): shape for key, shape in shapes.items() if ".0.mlp." in key}
        fixture = replace(fixture, shapes=shapes)
    if name == "glm4_moe":  # it has as many experts as the size of a head
        fixture = resized(fixture, {12: 16}, "self_attn.")
    fixture = resized(fixture, SIZES | sizes, **{"hidden_size": 64, "intermediate_size": 96} | changes)
    config = sized(fixture)

    def scaling(writer: gguf.GGUFWriter) -> None:
        if name == "gemma3":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(8.0)
        if name == "ministral3":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(8.0)
            writer.add_rope_scaling_orig_ctx_len(32)
            writer.add_rope_scaling_yarn_log_mul(1.0)
            writer.add_attn_temperature_scale(0.5)
        if name == "olmo3":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(8.0)
            writer.add_rope_scaling_orig_ctx_len(32)
            writer.add_rope_scaling_yarn_attn_factor(1 + 0.1 * np.log(8))
            writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])])

    file = tmp_path / "model.gguf"
    values = write_gguf(file, config, fixture.weights(), mixed, more=scaling)
    plain = write_model(tmp_path / "plain", config, values)
    assert model_spec(checkpoint.read_config(file)) == model_spec(config)
    chex.assert_trees_all_equal(load(file, device_count), load(plain, device_count))


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen2", gguf.MODEL_ARCH.QWEN2VL), ("qwen3", gguf.MODEL_ARCH.QWEN3VL)]
)
def test_models_beside_a_vision_tower_are_read_as_without(
    name: str, architecture: gguf.MODEL_ARCH, tmp_path: Path
) -> None:
    fixture, files = Fixture.load(name), (tmp_path / "text.gguf", tmp_path / "vision.gguf")
    config = sized(fixture, use_sliding_window=False)
    write_gguf(files[0], config, fixture.weights())
    sections = {"architecture": architecture, "more": lambda file: file.add_rope_dimension_sections([2, 2, 2, 0])}
    write_gguf(files[1], config, fixture.weights(), **sections)
    text, vision = (model_spec(checkpoint.read_config(file)) for file in files)
    assert text == vision == model_spec(config)
    chex.assert_trees_all_equal(*map(load, files))


def test_gpt_oss_whose_gates_and_features_are_apart(tmp_path: Path) -> None:
    changes = {"head_dim": 16, "hidden_size": 96, "intermediate_size": 32}
    fixture = resized(Fixture.load("gpt_oss"), {84: 96, 72: 96, 24: 32, 48: 64}, **changes)
    config, weights = sized(fixture), fixture.weights()
    # Files do not say how gates are bounded.
    config |= {"rope_theta": 5000.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}

    def scaling(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_yarn_beta_fast(8.0)

    def kind_of(name: str) -> Kind:
        return Kind.F32 if name.endswith("bias") else mixed(name)

    file = tmp_path / "model.gguf"
    values = write_gguf(file, config, gpt_oss_in_file(weights), kind_of, more=scaling)
    plain = write_model(tmp_path / "plain", config, gpt_oss_of_file(values, weights))
    assert model_spec(checkpoint.read_config(file)) == model_spec(config)
    for size in (1, 2):
        chex.assert_trees_all_equal(load(file, size), load(plain, size))


@pytest.mark.parametrize("name", ["llama-rope", "llama-linear", "llama-yarn", "phi3-longrope"])
def test_scalings_of_the_rope(name: str, tmp_path: Path) -> None:
    fixture = Fixture.load(name)
    config, extra = sized(fixture), {}
    if name == "phi3-longrope":
        scaling = config["rope_scaling"]
        factors = {key: np.array(scaling[f"{key}_factor"], np.float32) for key in ("long", "short")}
        extra = {f"rope_factors_{key}.weight": value for key, value in factors.items()}
    if name == "llama-rope":
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    spec = model_spec(config, fixture.max_model_len)
    if name == "llama-rope":
        plain = config["rope_theta"] ** (-np.arange(0, 12, 2) / 12)
        assert spec.layers[0].rope is not None
        extra = {"rope_freqs.weight": (plain / spec.layers[0].rope.inv_freq).astype(np.float32)}

    def add(writer: gguf.GGUFWriter) -> None:
        if name == "llama-linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(2.0)
        if name == "llama-yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(32)
            writer.add_rope_scaling_yarn_beta_fast(8.0)
        if name == "phi3-longrope":
            writer.add_rope_scaling_orig_ctx_len(32)
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(4) / np.log(32))))

    write_gguf(tmp_path / "model.gguf", config, fixture.weights(), extra=extra, more=add)
    found = model_spec(checkpoint.read_config(tmp_path / "model.gguf"), fixture.max_model_len)
    for own, expected in zip(found.layers, spec.layers, strict=True):
        assert own.rope is not None and expected.rope is not None
        np.testing.assert_allclose(own.rope.inv_freq, expected.rope.inv_freq, rtol=1e-6)
        np.testing.assert_allclose(own.rope.scale, expected.rope.scale, rtol=1e-6)
        assert replace(own, rope=expected.rope) == expected
    assert replace(found, layers=spec.layers) == spec


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits.keys() - {Kind.BF16}), ids=lambda kind: kind.name)
def test_every_type_is_decoded_from_and_to_any_column(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 5, max(2 * block, 64)
    # No byte is above 0x3f, so that scales in half precision are below 2.
    data = np.random.default_rng(0).integers(0, 64, (rows, columns // block * size)).astype(np.uint8)
    path = tmp_path / "bytes"
    path.write_bytes(b"12345" + data.tobytes())
    tensor = GgufTensor(path, int(kind), (rows, columns), 5)
    part = values_of(tensor, "x", BlockType.of(int(kind), "x"), np.fromfile(path, np.uint8))
    expected = gguf.quants.dequantize(data, kind)
    assert np.ptp(expected) > 0
    boxes = (((0, 0), (rows, columns)), ((2, 3), (2, columns - 7)), ((4, block - 1), (1, 2)), ((1, 5), (3, 1)))
    for start, shape in boxes:
        box = Box(start, shape)
        np.testing.assert_array_equal(part(box), expected[box.index((0, 0))])


@pytest.mark.parametrize(
    ("kind", "halves"),
    [(Kind.Q4_0, (0,)), (Kind.Q8_0, (0,)), (Kind.Q4_K, (0, 2)), (Kind.Q5_K, (0, 2)), (Kind.Q6_K, (208,))],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_xla_decodes_the_usual_types_to_the_numbers_of_the_package(
    kind: Kind, halves: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (2**20 // block + 3, size)).astype(np.uint8)  # more than a call
    for place in halves:  # numbers in half precision of all exponents below that of 1
        data[:, place + 1] &= 0xBB
    by_xla = BlockType.of(int(kind), "x")
    monkeypatch.setattr(gguf_blocks, "_has_host", lambda: False)
    by_numpy = BlockType.of(int(kind), "x")
    for dtype in (np.float32, ml_dtypes.bfloat16):
        np.testing.assert_array_equal(by_xla.decode(data, dtype), by_numpy.decode(data, dtype))


def test_blocks_of_eight_and_four_bits_mean_what_ggml_says(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    scales = stream.uniform(0.1, 1, (3, 2)).astype(np.float16)
    codes = stream.integers(-128, 128, (3, 2, 32)).astype(np.int8)
    bytes_ = [scales[..., None].view(np.uint8), codes.view(np.uint8)]
    found = BlockType.of(int(Kind.Q8_0), "x").decode(np.concatenate(bytes_, axis=-1).reshape(3, -1), np.float32)
    np.testing.assert_array_equal(found, (scales[..., None].astype(np.float32) * codes).reshape(3, 64))
    nibbles = codes.view(np.uint8) & 15  # byte j has number j in its low bits, and number j + 16
    packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    stored = np.concatenate([bytes_[0], packed], axis=-1).reshape(3, -1)
    found = BlockType.of(int(Kind.Q4_0), "x").decode(stored, np.float32)
    values = scales[..., None].astype(np.float32) * (nibbles.astype(np.float32) - 8)
    np.testing.assert_array_equal(found, values.reshape(3, 64))


def test_blocks_of_signs_mean_what_ggml_says(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    scales = stream.uniform(0.1, 1, (5, 2, 1)).astype(np.float16)
    signs = stream.integers(0, 256, (5, 2, 16)).astype(np.uint8)
    path = tmp_path / "bytes"
    path.write_bytes(np.concatenate([scales.view(np.uint8), signs], axis=-1).tobytes())
    tensor = GgufTensor(path, int(Kind.Q1_0), (5, 256), 0)
    part = values_of(tensor, "x", BlockType.of(int(Kind.Q1_0), "x"), np.fromfile(path, np.uint8))
    bits = [[signs[row, i // 128, i % 128 // 8] >> i % 8 & 1 for i in range(256)] for row in range(5)]
    expected = np.repeat(scales.astype(np.float32), 128, axis=-1).reshape(5, 256) * (2 * np.array(bits) - 1.0)
    for start, shape in (((0, 0), (5, 256)), ((2, 3), (2, 200))):
        box = Box(start, shape)
        np.testing.assert_array_equal(part(box), expected[box.index((0, 0))])


def test_only_files_of_rare_types_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture, path = Fixture.load("llama"), tmp_path / "model.gguf"
    config = sized(fixture)
    weights = {name: data[:, :32] if data.ndim == 2 else data for name, data in fixture.weights().items()}
    write_gguf(path, config, fixture.weights(), lambda _: Kind.F16)
    write_gguf(tmp_path / "usual.gguf", config, weights, lambda _: Kind.Q4_0)
    write_gguf(tmp_path / "quantized.gguf", config, weights, lambda _: Kind.Q5_1)
    monkeypatch.setitem(sys.modules, "gguf", None)
    load(path)
    GgufTensors.of(GgufFile.open(tmp_path / "usual.gguf"))
    with pytest.raises(
        NotImplementedError, match=r"tensor \S+ is quantized, and decoding it needs a package that is not here: .*gguf"
    ):
        GgufTensors.of(GgufFile.open(tmp_path / "quantized.gguf"))


def write_demo(path: Path, **options: Any) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    weights = {name: data.astype(np.float32) for name, data in load_file(DEMO_MODEL / "model.safetensors").items()}
    write_gguf(path, config, weights, lambda _: Kind.BF16, more=demo_tokenizer(DEMO_MODEL), **options)


def test_the_demo_model_in_split_files_answers_as_in_its_directory(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo-BF16.gguf", split_max_tensors=15)
    assert len(list(tmp_path.iterdir())) > 1
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_pages": 9, "max_decode_burst": 1}
    with quick_engines(), LLM(f"{tmp_path}:bf16", dtype="float32", speculation=False, **options) as llm:
        [output] = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=12))
    prompt, answer = Tokenizer.from_directory(DEMO_MODEL).encode("Once upon a time"), list(output.outputs[0].token_ids)
    assert list(output.prompt_token_ids) == prompt
    spec = model_spec(checkpoint.read_config(DEMO_MODEL))
    logits = dense_logits(load(DEMO_MODEL), spec, [*prompt, *answer])
    assert answer == np.argmax(logits[len(prompt) - 1 : -1], axis=1).tolist()


def test_layers_may_have_a_number_of_kv_heads_each_if_all_are_the_same(tmp_path: Path) -> None:
    fixture, path = Fixture.load("qwen3"), tmp_path / "model.gguf"
    config, weights = sized(fixture), fixture.weights()
    heads, others = config["num_key_value_heads"], config["num_hidden_layers"] - 1
    write_gguf(path, config | {"num_key_value_heads": [heads] * others + [heads]}, weights)
    assert checkpoint.read_config(path)["num_key_value_heads"] == heads
    write_gguf(path, config | {"num_key_value_heads": [heads] * others + [1]}, weights)
    with pytest.raises(ValueError, match="num_key_value_heads"):
        load(path)
    # The same holds for queries, whose rows an architecture may have in another order.
    fixture = Fixture.load("llama")
    config, plain = sized(fixture), tmp_path / "plain.gguf"
    write_gguf(plain, config, fixture.weights())

    def by_layer(counts: list[int]) -> Callable[[gguf.GGUFWriter], None]:
        def state(file: gguf.GGUFWriter) -> None:
            del file.kv_data[0]["llama.attention.head_count"]
            file.add_head_count(counts)

        return state

    counts = [config["num_attention_heads"]] * config["num_hidden_layers"]
    write_gguf(path, config, fixture.weights(), more=by_layer(counts))
    chex.assert_trees_all_equal(load(path), load(plain))
    write_gguf(path, config, {}, extra=EMBEDDING, more=by_layer([0, 0]))
    with pytest.raises(ValueError, match=r"model.gguf must have a number llama.*head_count above 0, .*\[0, 0\]"):
        GgufTensors.of(GgufFile.open(path))


@pytest.mark.parametrize(("name", "dtype"), [("gemma3", "bfloat16"), ("llama", "float16")])
def test_models_that_exceed_float16_are_not_computed_in_it(name: str, dtype: str, tmp_path: Path) -> None:
    fixture, path = Fixture.load(name), tmp_path / "model.gguf"
    write_gguf(path, sized(fixture), fixture.weights(), more=lambda file: file.add_file_type(1))
    assert checkpoint.read_config(path)["dtype"] == dtype


@pytest.mark.parametrize(("name", "stated"), [("granite", {}), ("granitemoehybrid-dense", {"head_dim": 16})])
def test_granite_has_the_usual_scale_of_attention_unless_a_file_states_one(
    name: str, stated: dict[str, int], tmp_path: Path
) -> None:
    fixture, path = Fixture.load(name), tmp_path / "model.gguf"
    config = sized(fixture) | {"attention_multiplier": None} | stated
    more = add_granite_hybrid if "hybrid" in name else lambda *_: None
    write_gguf(path, config, {}, extra=EMBEDDING, more=lambda file: more(file, config))
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    assert checkpoint.read_config(path)["attention_multiplier"] == size**-0.5


def test_what_does_not_fit_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    fixture, path = Fixture.load("llama"), tmp_path / "model.gguf"
    config, weights = sized(fixture), fixture.weights()

    def refused(message: str, **options: Any) -> None:
        write_gguf(path, options.pop("config", config), options.pop("weights", weights), **options)
        with pytest.raises(ValueError, match=message):
            load(path)

    one = "model.layers.1.self_attn.v_proj.weight"
    refused(f"model.gguf lacks the tensor {one}", weights={name: x for name, x in weights.items() if name != one})
    refused(
        r"model.gguf: tensor blk.1.attn_v.weight has shape \(12, 50\), and the metadata make it \(12, 84\)",
        weights=weights | {one: np.zeros((12, 50), np.float32)},
    )
    refused("model.gguf: tensor blk.9.odd.weight: unexpected", extra={"blk.9.odd.weight": np.zeros(3, np.float32)})
    again = {"model.norm.weight": np.ones(3, np.float32)}
    refused("model.gguf has the same tensor several times, as .*output_norm.weight and", extra=again)
    refused("model.gguf: tensor x.weight has the type I8", extra={"x.weight": np.zeros(3, np.int8)})
    refused("must have a number general.file_type", more=lambda file: file.add_array("general.file_type", [1, 2]))
    key = "llama.nextn_predict_layers"
    refused(f"must have a number {key}, not '1'", more=lambda file: file.add_string(key, "1"))

    def with_layers(file: gguf.GGUFWriter) -> None:
        file.kv_data[0]["llama.block_count"].value = 20_000

    refused("model.gguf has 20000 layers: models have 10000 at most", more=with_layers)
    refused("must have a number llama.expert_used_count", more=lambda file: file.add_expert_count(4))
    refused("has llama.rope.scaling .*: known types are", more=lambda file: file.add_string(f"{SCALING}.type", "su"))
    refused("has llama.rope.scaling .*: known types are", more=lambda file: file.add_float32(f"{SCALING}.odd", 2.0))
    for kind in ("yarn", "linear"):
        refused(
            "must have a number llama.rope.scaling.factor above 0, not None",
            more=lambda file, kind=kind: file.add_string(f"{SCALING}.type", kind),
        )
    refused("has keys of 0 numbers: heads have 1 to 2048", more=lambda file: file.add_key_length(0))
    refused("has keys of 3000000000 numbers", more=lambda file: file.add_key_length(3_000_000_000))
    smaller = sized(fixture, head_dim=4)
    refused("has llama.rope.dimension_count 12, and heads of 4", config=smaller | {"partial_rotary_factor": 3})
    refused("has llama.logit_scale = 2.0, which is not supported", more=lambda file: file.add_logit_scale(2.0))
    refused("has llama.attention.causal = False", more=lambda file: file.add_bool("llama.attention.causal", False))
    more_weight = f"{SCALING}.attn_factor"
    refused("attn_factor 2.0: it is known with LongRoPE", more=lambda file: file.add_float32(more_weight, 2.0))
    refused(
        "has llama.rope.scaling.type 'linear' beside rope_freqs.weight",
        more=lambda file: file.add_string(f"{SCALING}.type", "linear"),
        extra={"rope_freqs.weight": np.ones(6, np.float32)},
    )
    factors = np.ones(1025, np.float32)
    refused("must have a tensor rope_freqs.weight of at most 1024", extra={"rope_freqs.weight": factors})
    write_gguf(path, config, weights)
    good = path.read_bytes()
    path.write_bytes(good.replace(b"llama", b"camel"))
    with pytest.raises(ValueError, match="model.gguf has general.architecture 'camel', which is not supported in GGUF"):
        load(path)
    path.write_bytes(good.replace(b"llama.block_count", b"llama.block_xount"))
    with pytest.raises(ValueError, match="model.gguf must have a number llama.block_count, not None"):
        load(path)
    path.write_bytes(good[:-64])
    with pytest.raises(ValueError, match=r"model.gguf: tensor \S+ has \d+ bytes, of which \d+ are there"):
        load(path)
    with pytest.raises(ValueError, match="model.gguf is a GGUF file: convert takes a directory"):
        checkpoint.convert(path, tmp_path / "out", dtype="auto", mesh=make_mesh(MeshShape(1, 1), jax.devices()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("exaone4", lambda file: file.add_nextn_predict_layers(1), "exaone4.nextn_predict_layers = 1"),
        ("glm4", lambda file: file.add_nextn_predict_layers(1), "glm4.nextn_predict_layers = 1"),
        (
            "glm4_moe",
            lambda file: file.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
            "glm4moe.expert_gating_func = 1",
        ),
    ],
)
def test_what_only_some_architectures_do_not_compute(
    name: str, change: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path
) -> None:
    fixture, path = Fixture.load(name), tmp_path / "model.gguf"
    config = sized(fixture) | {"first_k_dense_replace": 1}
    write_gguf(path, config, fixture.weights(), more=change)
    with pytest.raises(ValueError, match=f"model.gguf has {message}, which is not supported: it changes the model"):
        checkpoint.read_config(path)


@pytest.mark.parametrize(
    ("fixture", "name", "message"),
    [
        ("qwen3_moe", "blk.0.ffn_up_exps.weight", rf"has shape \({2**60}, 24, 48\), and should have 6 matrices"),
        ("llama", "token_embd.weight", f"has {2**60} rows, and fewer bytes"),
        ("llama", "token_embd.weight", f"has {2**30} rows: vocabularies have {2**24} at most"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_made(
    fixture: str, name: str, message: str, tmp_path: Path
) -> None:
    rows = 2**30 if "at most" in message else 2**60
    path, own = tmp_path / "model.gguf", Fixture.load(fixture)
    write_gguf(path, sized(own), {name: data for name, data in own.weights().items() if ".1.mlp." not in name})
    shape, data = GgufFile.open(path).tensors[name].shape, path.read_bytes()
    # After the name there is the number of dimensions, and the slowest comes last.
    start = data.index(name.encode()) + len(name) + 4 + 8 * (len(shape) - 1)
    assert data[start : start + 8] == shape[0].to_bytes(8, "little")
    path.write_bytes(data[:start] + rows.to_bytes(8, "little") + data[start + 8 :])
    os.truncate(path, 2**31)  # which takes no room on the disk
    with pytest.raises(ValueError, match=rf"model.gguf: tensor {name} {message}"):
        load(path)
