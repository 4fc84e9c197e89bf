"""Engines whose matrices have few bits: one text whatever multiplies, on every mesh, and weights that are replaced."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms, Matrix
from jaxvllm.models.forms.cpu_groups import CodeTable, CpuGroups
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.forms.scaled_rows import ScaledRows
from jaxvllm.models.forms.tpu_groups import TpuGroups
from jaxvllm.models.heads.head import DRAFT
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.quantized_matmul.code import E4M3
from tests.engine.tiny import (
    GREEDY,
    all_drafts_or_none,
    greedy_by,
    greedy_tokens,
    one_program,
    random_prompts,
    tiny_llm,
    write_tiny_checkpoint,
)
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture
from tests.models.published.test_packed_integers import compressed, packed
from tests.models.published.written import resized, write_model
from tests.quick import quick_compilation

PROMPTS = random_prompts(3, 20, seed=7)


def recomputed(path: Path, forms: Forms) -> list[list[int]]:
    """What each prompt goes on with, by the layers without pages or an engine."""
    spec = model_spec(checkpoint.read_config(path))
    params = checkpoint.load(path, spec, dtype=jnp.float32, layout="separate", forms=forms)
    return greedy_by(jax.jit(lambda tokens: dense_logits(params, spec, tokens)), PROMPTS, 8, room=32)


# The forms of a CPU's kernels, which round tokens, so that theirs is another model.
KERNELS = Backend("cpu", host_chip())


@pytest.fixture(scope="module")
def published(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose projections are stored as integers of four bits, in groups of 16 inputs."""
    path, tensors = tmp_path_factory.mktemp("int4"), {}
    shutil.copytree(tiny_checkpoint, path, dirs_exist_ok=True)
    for name, weight in load_file(tiny_checkpoint / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = weight
            continue
        rows, columns = weight.shape
        grouped = np.zeros((rows, -(-columns // 16) * 16), np.float32)
        grouped[:, :columns] = weight
        grouped = grouped.reshape(rows, -1, 16)
        scales = np.abs(grouped).max(-1) / 7
        codes = np.rint(grouped / scales[..., None]).astype(np.int64).reshape(rows, -1)[:, :columns] + 8
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.weight_packed": packed(codes, 4), f"{base}.weight_scale": scales}
    settings = compressed("pack-quantized", num_bits=4, type="int", group_size=16)
    config = checkpoint.read_config(tiny_checkpoint) | {"quantization_config": settings}
    return write_model(path, config, tensors)


@pytest.mark.parametrize(
    "options",
    [{}, {"mesh": "2x1x2", "attention_backend": "reference"}],
    ids=["kernels", "stages"],
)
def test_the_same_tokens(options: dict[str, Any], tiny_checkpoint: Path) -> None:
    forms = Forms(layers=ScaledRows()) if options else Forms.chosen("int8", KERNELS, may_turn=True, by_tile=True)
    form, best_tokens = forms.layers, recomputed(tiny_checkpoint, forms)
    programs = one_program() if options else nullcontext()
    with programs, tiny_llm(tiny_checkpoint, quantization="int8", dtype="float32", **options) as llm:
        assert greedy_tokens(llm, PROMPTS, 8) == best_tokens
        held = jax.tree.leaves(llm.weights["layers"], is_leaf=lambda node: isinstance(node, Matrix))
        assert any(isinstance(node, Matrix) and isinstance(node.form, type(form)) for node in held)
        if options:
            return
        # Weights of a checkpoint are rounded as at the start, and a tree like the engine's is taken as it is.
        other = jax.tree.map(lambda array: array * 0, llm.weights)
        llm.update_weights(other)
        assert greedy_tokens(llm, PROMPTS, 8) != best_tokens
        llm.update_weights(tiny_checkpoint)
        assert greedy_tokens(llm, PROMPTS, 8) == best_tokens


@pytest.mark.parametrize("mesh", ["1x1", "1x2"])
def test_stored_bits_give_the_tokens_of_the_decoded_model(mesh: str, published: Path, tiny_checkpoint: Path) -> None:
    expected = recomputed(published, Forms())
    with one_program(), tiny_llm(published, dtype="float32", mesh=mesh) as llm:
        held = jax.tree.leaves(llm.weights["layers"], is_leaf=lambda node: isinstance(node, Matrix))
        assert sum(isinstance(node, Matrix) and isinstance(node.form, ScaledGroups) for node in held) == 4 * 3
        # Prompts are longer than a step, so they come in chunks.
        assert greedy_tokens(llm, PROMPTS, 8) == expected
        assert greedy_tokens(llm, PROMPTS[:1], 8) == expected[:1]
        # Other weights are rounded to the forms that the engine has, and the first ones are taken as they are stored.
        llm.update_weights(tiny_checkpoint)
        rounded = jax.tree.leaves(llm.weights["layers"], is_leaf=lambda node: isinstance(node, Matrix))
        assert [type(node) for node in rounded] == [type(node) for node in held]
        llm.update_weights(published)
        assert greedy_tokens(llm, PROMPTS, 8) == expected


def test_a_draft_has_the_forms_of_its_own_checkpoint(published: Path, tiny_checkpoint: Path) -> None:
    draft = {"method": "draft_model", "model": str(published), "num_speculative_tokens": 2}
    options: dict[str, Any] = {"dtype": "float32", "speculative_config": json.dumps(draft)}
    with all_drafts_or_none(bursts=False), tiny_llm(tiny_checkpoint, **options) as llm:
        held = jax.tree.leaves(llm.weights[DRAFT], is_leaf=lambda node: isinstance(node, Matrix))
        assert any(isinstance(node, Matrix) and isinstance(node.form, ScaledGroups) for node in held)
        assert greedy_tokens(llm, PROMPTS, 8) == recomputed(tiny_checkpoint, Forms())


@pytest.mark.parametrize("quantization", ["int4_g32", "fp8"])
def test_matrices_are_rounded_while_they_are_read(quantization: str, tiny_checkpoint: Path) -> None:
    forms = Forms.chosen(quantization, KERNELS, may_turn=True, by_tile=True)
    with one_program(), tiny_llm(tiny_checkpoint, quantization=quantization, dtype="float32") as llm:
        assert greedy_tokens(llm, PROMPTS, 8) == recomputed(tiny_checkpoint, forms)
        head = llm.weights.get("lm_head", llm.weights["embed"])
        has_few_bits = isinstance(head, Matrix) and isinstance(head.form, CodeTable | CpuGroups)
        assert has_few_bits == (quantization != "fp8")


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted_kernels")
def test_the_kernel_for_tpus_gives_the_tokens_of_the_decoded_model_on_a_mesh(tmp_path: Path) -> None:
    # One layer, of which two devices have matrices that fill whole tiles. Others would be left in 16 bits. The prompts
    # come in chunks, and two share a page.
    sizes = {48: 128, 100: 256, 64: 256, 32: 128, 16: 64}
    whole = resized(Fixture.load("qwen3"), sizes, hidden_size=128, intermediate_size=256, head_dim=64)
    config = whole.config | {"num_hidden_layers": 1}
    shapes = {name: shape for name, shape in whole.shapes.items() if not re.search(r"layers\.[1-9]", name)}
    path = write_tiny_checkpoint(tmp_path, replace(whole, config=config, shapes=shapes))
    prompts = [list(range(1, 36)), [7], list(range(1, 36))]
    few = dict(max_num_seqs=4, row_buckets=(4,), num_pages=33, max_model_len=64, max_decode_burst=2)
    found = []
    for backend, of_mesh in (("reference", "1x1"), ("interpret", "1x2")):
        options = few | {"attention_backend": backend, "mesh": of_mesh, "quantization": "int4_g32"}
        with quick_compilation(), tiny_llm(path, dtype="float32", warm_up="background", **options) as llm:
            held = jax.tree.leaves(llm.weights["layers"], is_leaf=lambda node: isinstance(node, Matrix))
            kinds = {type(node.form) for node in held if isinstance(node, Matrix)}
            assert kinds == {TpuGroups if backend == "interpret" else ScaledGroups}
            outputs = llm.generate(prompts, replace(GREEDY, max_tokens=3, logprobs=1), use_tqdm=False)
            found.append([output.outputs[0] for output in outputs])
    expected, got = found
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


def test_groups_need_a_kernel_beside_cpus() -> None:
    with pytest.raises(NotImplementedError, match="int4 has no kernel for this device yet.*use int8 or fp8, or a CPU"):
        Forms.chosen("int4", REFERENCE, may_turn=False)
    assert Forms.chosen("fp8", REFERENCE, may_turn=False).layers == ScaledRows(code=E4M3)


def test_an_unknown_quantization_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="quantization mxfp8: use quantization='NAME' .NAME is int8"):
        tiny_llm(tiny_checkpoint, quantization="mxfp8")
