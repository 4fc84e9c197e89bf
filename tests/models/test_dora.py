"""The norms of DoRA are those of the rows that a matrix has in its form, whatever rounds the tokens of its products."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.dora import of_one_slot, with_ratios
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.forms import Forms
from jaxvllm.models.forms.cpu_groups import CpuGroups
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.form import Form
from jaxvllm.models.forms.rounded_tokens import RoundedTokens
from jaxvllm.models.forms.scaled_rows import ScaledRows
from jaxvllm.models.lora import DOWN, LAYERS, RATIO, UP
from jaxvllm.models.lora_arrays import LoraArrays, LoraRoom
from jaxvllm.models.params import Layout
from jaxvllm.models.peft import PeftAdapter
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.quantized_matmul.code import INT8
from sharding.axis import ALONE
from sharding.mesh import MeshShape
from tests.models.adapters import RandomAdapter
from tests.models.fixture import Fixture

FIXTURE = Fixture.load("llama")


def form_named(name: str) -> Form:
    """A form that rounds each row of a matrix to int8 with one scale."""
    chip = host_chip()
    if name == "rows":
        return ScaledRows()
    if name == "rounded tokens":
        return RoundedTokens(code=INT8)
    if chip is None:
        pytest.skip("our kernels for CPUs do not run here")
    return CpuGroups(StoredAs(INT8, None, "float32"), None, chip)


def each(layers: Any) -> list[dict[str, np.ndarray]]:
    """The arrays of each layer, where a node has one."""
    if isinstance(layers, list):
        return [{name: np.asarray(node) for name, node in layer.items()} for layer in layers]
    stacks = {name: np.asarray(node) for name, node in layers.items()}
    return [{name: stack[layer] for name, stack in stacks.items()} for layer in range(len(next(iter(stacks.values()))))]


@pytest.mark.parametrize(
    ("name", "layout"), [("rows", "separate"), ("rounded tokens", "stacked"), ("kernel", "separate")]
)
def test_norms(name: str, layout: Layout, tmp_path: Path) -> None:
    spec, family = model_spec(FIXTURE.config, FIXTURE.max_model_len), find_family(FIXTURE.config)
    forms = Forms(layers=form_named(name))
    arrays = LoraArrays.of(spec, family, MeshShape(1, 1), layout, "float32", forms, LoraRoom(2, 8))
    adapter = RandomAdapter(FIXTURE, seed=5, ends=("down_proj", "v_proj"), config={"use_dora": True})
    read = PeftAdapter.read(adapter.write(tmp_path / "adapter"), arrays.sizes, 8)
    huge = next(one for name, one in read.modules.items() if name.endswith("down_proj"))
    assert huge.magnitudes is not None
    # The ratio of row 0 is one that float32 holds, and the product of B with it is above that.
    huge.down[:], huge.magnitudes[0], huge.up[0] = huge.down * np.float32(1e-3), 3e38, 9
    directory = FIXTURE.write_checkpoint(tmp_path / "model")

    def layers(forms: Forms) -> Any:
        return checkpoint.load(directory, spec, dtype="float32", layout=layout, forms=forms)["layers"]

    one = arrays.of_adapter(read.modules)[LAYERS]
    given, plain = each(one), each(layers(Forms()))
    found = each(with_ratios(one, layers(forms), of_one_slot(arrays.spec), ALONE))
    for matrix in ("down", "qkv"):
        for own, base, ratios in zip(given, plain, found, strict=True):
            scales = np.abs(base[matrix]).max(-1, keepdims=True) / 127
            rows = np.round(base[matrix] / scales) * scales + own[UP + matrix] @ own[DOWN + matrix]
            [magnitudes] = own[RATIO + matrix]
            assert (magnitudes == 0).any() == (matrix == "qkv"), "queries and keys have none"
            expected = np.where(magnitudes == 0, 0, magnitudes / np.linalg.norm(rows, axis=-1) - 1)
            np.testing.assert_allclose(ratios[RATIO + matrix], expected[None], rtol=2e-5, atol=2e-5)
            assert np.isfinite(ratios[UP + matrix]).all(), "others multiply it by zero"
