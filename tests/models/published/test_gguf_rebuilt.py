"""GGUF files whose tensors are cut, turned or in another order than a checkpoint's make the same models."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import chex
import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.published import gguf_tensors
from jaxvllm.models.published.shaped_part import ShapedPart, concatenated
from jaxvllm.models.tiling import Box
from tests.gguf_cases import CASES, Case, Config, Tensors, as_written, written
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
