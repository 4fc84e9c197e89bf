"""GGUF files whose tensors are cut, turned or in another order than a checkpoint's make the same models."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor as Threads
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import chex
import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.gguf_file import GgufFile
from jaxvllm.models import checkpoint, tiling
from jaxvllm.models.families import model_spec
from jaxvllm.models.published import gguf_tensors
from jaxvllm.models.published.gguf_tensors import GgufTensors
from jaxvllm.models.published.shaped_part import ShapedPart, concatenated
from jaxvllm.models.tiling import Box
from jaxvllm.models.weight_names import Source
from tests.gguf_cases import CASES, Case, Config, Tensors, add_latent_before_next, as_written, written
from tests.models.published.written import write_model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fixture)
def test_a_file_is_the_same_model_as_its_checkpoint(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tensors, "_PIECE", 2000)  # so that several threads decode
    fixture, config = as_written(case)
    path = tmp_path / "model.gguf"
    plain = write_model(tmp_path / "plain", config, written(case, fixture, config, path))
    spec = model_spec(config)
    assert model_spec(checkpoint.read_config(path)) == spec
    options: dict[str, Any] = {"dtype": jnp.float32, "layout": "separate"}
    chex.assert_trees_all_equal(checkpoint.load(path, spec, **options), checkpoint.load(plain, spec, **options))


@pytest.mark.parametrize(
    ("number", "name", "shape", "message"),
    [
        (
            0,
            "blk.1.attn_k_b.weight",
            (6, 20, 12),
            r"attn_k_b.weight makes no .*: tensors of the shapes .* no one tensor",
        ),
        (0, "blk.1.attn_v_b.weight", (7, 11, 20), r"attn_k_b.weight makes .* of shape \(161, 20\), and the metadata"),
        (
            0,
            "blk.1.attn_v_b.weight",
            (140, 10),
            "attn_k_b.weight makes no .*: tensors of the shapes .* are no one tensor",
        ),
        (
            -2,
            "blk.0.attn_qkv.weight",
            (255, 48),
            r"attn_qkv.weight makes no .*: .*\(255, 48\) should have 256 elements",
        ),
        (-2, "blk.0.ssm_a", (8, 2), r"ssm_a makes .*A_log of shape \(8, 2\), and the metadata make it \(8,\)"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(
    number: int, name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    case, path = CASES[number], tmp_path / "model.gguf"
    other = replace(case, in_file=lambda own, data, config: changed(case.in_file(own, data, config), own, name, shape))
    fixture, config = as_written(other)
    written(other, fixture, config, path)
    with pytest.raises(ValueError, match=f"model.gguf: tensor blk.*{message}"):
        checkpoint.load(path, model_spec(config), dtype=jnp.float32, layout="separate")


@pytest.mark.parametrize(
    ("number", "size", "message"),
    [
        (-3, 2**40, r"attn_qkv.weight makes no .*in_proj_qkvz.weight: .* should have \d{13,} elements along axis 0"),
        (-2, 2**40, r"attn_qkv.weight makes no .*in_proj_qkv.weight: .* should have \d{13,} elements along axis 0"),
        (-2, 0, r"\S+ makes no .*: ssm.group_count, .* are .*, and must be above 0"),
    ],
)
def test_sizes_of_metadata_are_compared_before_anything_of_that_size_is_made(
    number: int, size: int, message: str, tmp_path: Path
) -> None:
    case, path = CASES[number], tmp_path / "model.gguf"
    fixture, config = as_written(case)

    def enlarged(writer: gguf.GGUFWriter, config: Config) -> None:
        case.more(writer, config)
        [state] = (value for key, value in writer.kv_data[0].items() if key.endswith("ssm.state_size"))
        state.value, state.type = size, gguf.GGUFValueType.UINT64

    written(replace(case, more=enlarged), fixture, config, path)
    with pytest.raises(ValueError, match=f"model.gguf: tensor blk.0.{message}"):
        checkpoint.load(path, model_spec(config), dtype=jnp.float32, layout="separate")


def changed(own: Tensors | None, name: str, which: str, shape: tuple[int, ...]) -> Tensors | None:
    """The tensors of a file, of which one has another shape."""
    _, layer, end = which.split(".", 2)
    if own is None or end not in own or f".layers.{layer}." not in name:
        return own
    return {**own, end: np.full(shape, -1, np.float32)}


def test_metadata_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path, case = tmp_path / "model.gguf", CASES[0]
    fixture, config = as_written(case)

    def words(writer: gguf.GGUFWriter, config: Config) -> None:
        case.more(writer, config)
        writer.kv_data[0]["deepseek2.attention.key_length_mla"].value = "20"
        writer.kv_data[0]["deepseek2.attention.key_length_mla"].type = gguf.GGUFValueType.STRING

    written(replace(case, more=words), fixture, config, path)
    with pytest.raises(ValueError, match=r"model.gguf has keys of deepseek2 that are no numbers where it needs some"):
        checkpoint.read_config(path)


def test_only_yarn_makes_logits_of_deepseek_steeper(tmp_path: Path) -> None:
    path, case = tmp_path / "model.gguf", CASES[0]
    fixture, config = as_written(case)

    def steeper(writer: gguf.GGUFWriter, config: Config) -> None:
        case.more(writer, config)
        for key in [key for key in writer.kv_data[0] if ".rope.scaling." in key]:
            del writer.kv_data[0][key]
        writer.add_rope_scaling_yarn_log_mul(0.1)

    written(replace(case, more=steeper), fixture, config, path)
    assert model_spec(checkpoint.read_config(path)) == model_spec(config | {"rope_scaling": None})


@pytest.mark.parametrize(
    ("fixture", "key", "counts"),
    [
        ("nemotron_h", "attention.head_count_kv", [0, 2]),
        ("nemotron_h", "feed_forward_length", [0, 104]),
        ("jamba", "attention.head_count_kv", [0, 2]),
        ("kimi_linear", "attention.head_count_kv", [0, 1]),
        ("glm_moe_dsa", "attention.indexer.types", [True]),
        ("lfm2", "attention.head_count_kv", [0, 2]),
        ("gemma4", "attention.sliding_window_pattern", [True] * 8),
        ("gemma3n", "activation_sparsity_scale", [0.5]),
    ],
)
def test_a_list_of_another_length_than_the_layers_is_refused(
    fixture: str, key: str, counts: list[Any], tmp_path: Path
) -> None:
    case, path = next(case for case in CASES if case.fixture == fixture), tmp_path / "model.gguf"
    own, config = as_written(case)

    def of_layers(writer: gguf.GGUFWriter, config: Config) -> None:
        case.more(writer, config)
        [value] = (value for name, value in writer.kv_data[0].items() if name.endswith(f".{key}"))
        value.value = counts

    written(replace(case, more=of_layers), own, config, path)
    with pytest.raises(
        ValueError, match=rf"model.gguf has metadata [\w-]+\.\* .*: {key} has {len(counts)} numbers, and"
    ):
        checkpoint.read_config(path)


def case_of(fixture: str, **changes: Any) -> Case:
    return replace(next(case for case in CASES if case.fixture == fixture), **changes)


def test_tensors_tell_which_layers_have_experts_or_an_index(tmp_path: Path) -> None:
    path, case = tmp_path / "model.gguf", case_of("glm_moe_dsa", more=add_latent_before_next)
    fixture, config = as_written(case)
    written(case, fixture, config, path)
    assert model_spec(checkpoint.read_config(path)) == model_spec(config)
    case = case_of("jamba")
    fixture, config = as_written(case)
    dense = {name: shape for name, shape in fixture.shapes.items() if ".layers.2.feed_forward." not in name}
    written(case, replace(fixture, shapes=dense), config, path)
    assert model_spec(checkpoint.read_config(path)) == model_spec(config | {"num_experts": 1})


def test_what_files_of_states_and_activations_must_have(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def load(case: Case, without: str = "") -> None:
        fixture, config = as_written(case)
        shapes = {name: shape for name, shape in fixture.shapes.items() if name != without}
        written(case, replace(fixture, shapes=shapes), config, path)
        checkpoint.load(path, model_spec(checkpoint.read_config(path)), dtype=jnp.float32, layout="separate")

    with pytest.raises(
        ValueError, match=r"jamba\.\* .*: attn_layers are \[0, 1, 3\] of 4, and should be one in each of"
    ):
        load(case_of("jamba", stated={"num_key_value_heads": [2, 2, 0, 2]}))
    with pytest.raises(ValueError, match=r"jamba\.\* .*: attn_layers are \[\] of 4"):
        load(case_of("jamba", stated={"num_key_value_heads": [0, 0, 0, 0]}))
    with pytest.raises(ValueError, match=r"model.gguf lacks the tensor lm_head.weight"):
        load(case_of("falcon_h1"), "lm_head.weight")
    for numbers in ([0.5], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"model.gguf must have a list xielu.alpha_p of 4 numbers, one for each"):
            load(case_of("apertus", more=lambda writer, _, numbers=numbers: writer.add_array("xielu.alpha_p", numbers)))


def test_a_stack_is_checked_without_a_look_at_each_matrix_and_usable_cores_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, path = CASES[0], tmp_path / "model.gguf"
    fixture, config = as_written(case)
    written(case, fixture, config, path)
    tensors, looks = GgufTensors.of(GgufFile.open(path)), []
    look = gguf_tensors.values_of
    monkeypatch.setattr(
        gguf_tensors, "values_of", lambda *args, **options: looks.append(args) or look(*args, **options)
    )
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors.check(name, tuple(fixture.shapes[name]))
    assert config["num_attention_heads"] > 1 and len(looks) == 2  # keys and values
    # As many threads decode as the process may use cores, and not as the host has.
    counts: list[int] = []
    monkeypatch.setattr(gguf_tensors, "_PIECE", 200)
    monkeypatch.setattr(tiling, "ThreadPoolExecutor", lambda count: counts.append(count) or Threads(count))
    name = "model.embed_tokens.weight"
    rows, columns = fixture.shapes[name]
    source = Source(name, (rows, columns), (0, 0), (rows, columns))
    for cores in ({0}, {0, 1}, set(range(64))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores, raising=False)
        tensors.fill(source)(np.empty((rows, columns), np.float32), (0, 0))
    assert counts == [1, 2, 8]


def boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    ranges = [[(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in shape]
    for ends in product(*ranges):
        yield Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def test_any_box_of_what_is_made_has_its_values() -> None:
    stream = np.random.default_rng(0)
    arrays = [stream.standard_normal((2, size, 3)).astype(np.float32) for size in (2, 1)]
    parts = [ShapedPart(lambda box, one=one: one[box.index((0, 0, 0))].copy(), one.shape) for one in arrays]
    places = np.array([5, 0, 1, 4, 2, 3])
    whole = np.concatenate(arrays, axis=1)
    made = concatenated(parts, axis=1)
    for tensor, values in (
        (made, whole),
        (made.merged.ordered(0, places), whole.reshape(6, 3)[places]),
        (made.turned.mapped(np.negative), -whole.swapaxes(1, 2)),
        (made.merged.reshaped((6, 1, 3)), whole.reshape(6, 1, 3)),
    ):
        assert tensor is not None and tensor.shape == values.shape
        for box in boxes(tensor.shape):
            np.testing.assert_array_equal(tensor.part(box), values[box.index((0,) * values.ndim)])
    assert made.reshaped((2, 9)) is None
    with pytest.raises(ValueError, match=r"of the shapes \(2, 2, 3\) and \(2, 1, 3\) are no one tensor"):
        concatenated(parts, axis=2)
