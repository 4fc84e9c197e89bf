"""Checkpoints are read whole or refused by file and tensor."""

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxvllm.model_name import resolve
from jaxvllm.models import checkpoint
from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.families import model_spec
from tests.models.fixture import Fixture

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(directory: Path, **options: Any) -> Any:
    config = checkpoint.read_config(directory)
    return checkpoint.load(directory, model_spec(config), **({"dtype": jnp.float32, "layout": "separate"} | options))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Fixture.load("llama").write_checkpoint(tmp_path)


def split(model: Path) -> dict[str, str]:
    """Rewrites the single file as two shards with an index, which it returns."""
    weights = load_file(model / SINGLE)
    (model / SINGLE).unlink()
    names = sorted(weights)
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in names if weight_map[name] == file}, model / file)
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def change(model: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    weights = load_file(model / SINGLE)
    edit(weights)
    save_file(weights, model / SINGLE)


def test_shards_hold_the_same_model(model: Path) -> None:
    whole = load(model)
    split(model)
    chex.assert_trees_all_equal(load(model), whole)


def test_every_row_lands_in_its_place(tmp_path: Path) -> None:
    # Phi-3 has it all: fused, several KV heads, several query heads each.
    fixture = Fixture.load("phi3")
    spec = model_spec(fixture.config)
    params = load(fixture.write_checkpoint(tmp_path))
    fused = fixture.weights()["model.layers.2.self_attn.qkv_proj.weight"]
    attention = spec.layers[2].attention
    assert isinstance(attention, GroupedQueryAttention)
    H, K, G, D = attention.num_heads, attention.num_kv_heads, attention.group_size, attention.head_size
    ours = np.asarray(params["layers"][2]["qkv"]).reshape(K, G + 2, D, -1)
    for head in range(H):
        np.testing.assert_array_equal(ours[head // G, head % G], fused[head * D : (head + 1) * D])
    for head in range(K):
        np.testing.assert_array_equal(ours[head, G], fused[(H + head) * D : (H + head + 1) * D])
        np.testing.assert_array_equal(ours[head, G + 1], fused[(H + K + head) * D : (H + K + head + 1) * D])


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("wanted", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_dtypes(model: Path, stored: Any, wanted: Any, layout: str) -> None:
    change(model, lambda w: w.update({name: value.astype(stored) for name, value in w.items()}))
    params = load(model, dtype=wanted, layout=layout)
    layer = params["layers"][1]["down"] if layout == "separate" else params["layers"]["down"][1]
    assert layer.dtype == wanted
    expected = load_file(model / SINGLE)["model.layers.1.mlp.down_proj.weight"].astype(wanted)
    np.testing.assert_array_equal(np.asarray(layer), expected)


def test_tied_embeddings_have_no_head_even_when_one_is_stored(tmp_path: Path) -> None:
    fixture = Fixture.load("qwen3")
    model = fixture.write_checkpoint(tmp_path)
    change(model, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"]}))
    assert "lm_head" not in load(model)


def test_old_rope_buffers_are_passed_over(model: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(model, lambda w: w.update({name: np.zeros(6, np.float32)}))
    load(model)


def test_dummy_needs_only_a_config(model: Path) -> None:
    (model / SINGLE).unlink()
    chex.assert_trees_all_equal(*(load(model, load_format="dummy", seed=3) for _ in range(2)))


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop(Q), rf"lacks the tensor {Q}, which should have shape \(84, 84\)"),
        (lambda w: w.update({Q: w[Q][:5]}), rf"{SINGLE}: tensor {Q} has shape \(5, 84\).*makes it \(84, 84\)"),
        (lambda w: w.update({Q: w[Q].astype(np.int8)}), rf"tensor {Q} has dtype I8: supported are BF16, F16, F32"),
        (lambda w: w.update({"model.extra": w[Q]}), f"{SINGLE}: unexpected tensor model.extra: LlamaFor"),
        (lambda w: w.update({"a": w[Q].copy(), "b": w[Q]}), "unexpected tensor a and 1 more"),
    ],
)
def test_tensors_that_do_not_fit(model: Path, edit: Any, message: str) -> None:
    change(model, edit)
    with pytest.raises(ValueError, match=message):
        load(model)


def test_a_file_that_is_damaged(model: Path) -> None:
    data = (model / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    last = max(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"][1])

    def refused(content: bytes, message: str) -> None:
        (model / SINGLE).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{SINGLE} is not a complete safetensors file \(.*\){message}: download"):
            load(model)

    def with_header(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    refused(data[:-100], rf", tensor {last} ends at byte {len(data):,} of {len(data) - 100:,}")
    header[Q]["shape"] = [2**60, 84]
    wrong = rf", tensor {Q} has 28,224 bytes, which are no F32 \({2**60}, 84\)"
    refused(with_header(json.dumps(header).encode()), wrong)
    for text in (b"[" * 10_000, b"[1]", b'{"a": {"data_offsets": [1]}}', b'{"a": 1}'):
        refused(with_header(text), "")
    refused(b"", "")
    refused((2**60).to_bytes(8, "little") + data[8:], "")


def test_indexes_that_do_not_fit(model: Path) -> None:
    weight_map = split(model)
    file = model / INDEX

    def refused(text: str, message: str) -> None:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(model)

    refused("{", "is not an index")
    refused("{}", "needs a weight_map")
    refused(json.dumps({"weight_map": {Q: 5}}), "needs a weight_map")
    refused(json.dumps({"weight_map": weight_map | {Q: "gone.safetensors"}}), "names the shard gone.safetensors")
    refused(json.dumps({"weight_map": weight_map | {Q: "../x.safetensors"}}), "must lie beside their index")
    other = next(shard for shard in weight_map.values() if shard != weight_map[Q])
    refused(json.dumps({"weight_map": weight_map | {Q: other}}), f"says that {other} holds {Q}, and it does not")


def test_pickled_weights_are_never_opened(model: Path) -> None:
    (model / SINGLE).rename(model / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: such files can run code and are never opened"):
        load(model)
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=f"neither {SINGLE} nor {INDEX}: convert the model to safetensors.$"):
        load(model)


def test_configs_that_are_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone does not exist"):
        checkpoint.read_config(tmp_path / "gone")
    with pytest.raises(ValueError, match="has no config.json"):
        checkpoint.read_config(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "must hold a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            checkpoint.read_config(tmp_path)


def test_what_a_model_name_can_be(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    assert resolve(str(model)) == model
    with pytest.raises(ValueError, match="is a file: give the directory"):
        resolve(str(model / SINGLE))
    with pytest.raises(ValueError, match="is not a directory, nor a hub name"):
        resolve("/no/such/place")
    with pytest.raises(ValueError, match="model '~no such user/x' is in nobody's home"):
        resolve("~no such user/x")

    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool) -> str:
        asked.extend(allow_patterns)
        assert ignore_patterns == ["*mmproj*"] and not local_files_only  # vision towers
        assert not any(pattern.endswith((".bin", ".py")) for pattern in allow_patterns)
        if name == "owner/model":
            return str(model)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/model") == model
    (model / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert resolve("owner/model:q4_k_m") == model / "model-Q4_K_M.gguf"
    assert any(fnmatch("model-Q4_K_M.gguf", pattern) for pattern in asked)
    assert not any(fnmatch("model-IQ4_K_M.gguf", pattern) for pattern in asked)
    with pytest.raises(ValueError, match=r"could not be downloaded \(OSError: no network\)"):
        resolve("owner/other")


def test_the_dtype_of_a_config() -> None:
    assert checkpoint.config_dtype({}) == "float32"
    assert checkpoint.config_dtype({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert checkpoint.config_dtype({"dtype": "float16"}) == "float16"
    assert checkpoint.config_dtype({"text_config": {"torch_dtype": "bfloat16"}}) == "bfloat16"
    with pytest.raises(ValueError, match="dtype 'int8' is not supported"):
        checkpoint.config_dtype({"dtype": "int8"})


def test_unknown_ways_to_load(model: Path) -> None:
    with pytest.raises(ValueError, match="load_format must be auto or dummy, not 'pt'"):
        load(model, load_format="pt")
    with pytest.raises(ValueError, match="layout must be separate or stacked"):
        load(model, layout="flat")
