"""A plan of a GGUF file counts what an engine would keep of it, and knows it from the file's list of tensors."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from huggingface_hub.errors import LocalEntryNotFoundError

from benchmarks.qwen3 import qwen3, qwen3_moe, random_weights
from benchmarks.qwen3_gguf import gguf_writer, q4_k_m_tensors, write_q4_k_m
from jaxvllm.cli.plan import main
from jaxvllm.config import EngineConfig
from jaxvllm.model_name import local_gguf
from jaxvllm.models import checkpoint
from jaxvllm.models.params import abstract_params
from jaxvllm.planner import capacity_plan
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.known_models import find_config
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.cli.test_plan import compiled
from tests.gguf_files import write_gguf
from tests.planner.test_share import shard_bytes

SMALL = qwen3(4, 256, 512, 4, 2, 64, 400, max_position_embeddings=64, tie_word_embeddings=True)
# A model of the layers of Qwen3 8B.
LARGE = qwen3(36, 4096, 12288, 32, 8, 128, 2048)
EXPERTS = qwen3_moe(2, 256, 512, 2, 1, 4, 2, 64, 256, torch_dtype="float32", max_position_embeddings=64)


@pytest.fixture(scope="module")
def q4_k_m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small-Q4_K_M.gguf"
    write_q4_k_m(path, SMALL)
    return path


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 4.5 GB that is a hole where its tensors would be."""
    path = tmp_path_factory.mktemp("gguf") / "large.gguf"
    writer = gguf_writer(path, LARGE)
    for name, shape, kind in q4_k_m_tensors(LARGE):
        writer.add_tensor_info(name, shape, np.dtype(np.float32), _num_bytes(shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 32 + sum(_num_bytes(*tensor[1:]) for tensor in q4_k_m_tensors(LARGE)))
    return path


def _num_bytes(shape: tuple[int, ...], kind: Kind) -> int:
    count, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // count * size


def planned(path: Path | None, config: dict[str, Any], device: str, **options: Any) -> Deployment:
    return Deployment.of_config(EngineConfig(**options), config, device, path)


def both(path: Path, device: str, **options: Any) -> tuple[Deployment, Deployment]:
    """A file on a device, and the same model of which the config alone is known, and so 16 bits, or 32."""
    config = find_config(str(path))[1]
    return planned(path, config, device, **options), planned(None, config, device, **options)


@pytest.mark.parametrize("mesh", ["1x1", "1x2"])
def test_a_cpu_is_planned_to_keep_what_is_loaded(mesh: str, q4_k_m: Path) -> None:
    deployment, plain = both(q4_k_m, "cpu", mesh=mesh, dtype="float32")
    assert Deployment.from_json(deployment.to_json()) == deployment
    options: dict[str, Any] = {"mesh": make_mesh(MeshShape.parse(mesh), jax.devices()), "layout": "separate"}
    forms = replace(deployment.forms, own={})
    params = checkpoint.load(q4_k_m, deployment.spec, dtype="float32", forms=forms, **options)
    held = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(params))
    assert deployment.share.weight_bytes == held < plain.share.weight_bytes / 4
    # The compiled step takes the same arrays.
    taken = abstract_params(deployment.spec, "float32", deployment.layout, options["mesh"], deployment.forms)
    assert sum(map(shard_bytes, jax.tree.leaves(taken))) == held
    # On one CPU the embedding stays as it is, too. In half of the layers values are of another type than keys.
    assert (("embed", None) in deployment.forms.own) == (mesh == "1x1")
    assert len({deployment.forms.own["qkv", layer] for layer in range(4)}) == 2


@pytest.mark.parametrize(
    ("device", "kind", "kept"), [("h200", Kind.Q8_0, 0.54), ("v6e", Kind.Q4_0, 0.32), ("h200", Kind.MXFP4, 0.28)]
)
def test_devices_keep_groups_with_scales(device: str, kind: Kind, kept: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, EXPERTS, dict(random_weights(EXPERTS)), lambda name: Kind.F32 if "gate_inp" in name else kind)
    deployment, plain = both(path, device, mesh="1x2", dtype="bfloat16")
    mesh = make_mesh(MeshShape.parse("1x2"), jax.devices())
    params = abstract_params(deployment.spec, "bfloat16", "stacked", mesh, deployment.forms)
    assert deployment.share.weight_bytes == sum(map(shard_bytes, jax.tree.leaves(params)))
    assert deployment.share.expert_bytes < kept * plain.share.expert_bytes
    assert deployment.share.flops(8, 8) == plain.share.flops(8, 8)
    assert {name for name, _ in deployment.forms.own} == {"qkv", "o", "experts_gate_up", "experts_down", "lm_head"}


def test_a_plan_reads_no_tensors_and_tells_what_is_decoded(
    hollow: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capacity_plan, "compile_in_child", compiled)
    # A plan for other devices looks for none here.
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: pytest.fail("the planner looked for devices"))
    assert hollow.stat().st_blocks * 512 < 2**24 < hollow.stat().st_size, "the file has a hole"
    assert main([str(hollow), "--device", "h200"]) == 0
    report = capsys.readouterr().out.splitlines()
    assert report[2].startswith("  3.89 GiB in its files, whose matrices count as they are stored; what this device")
    deployment, plain = both(hollow, "h200")
    assert deployment.share.weight_bytes == plain.share.weight_bytes
    # An H200 has no form for K-quants, and a CPU has.
    on_cpu, _ = both(hollow, "cpu")
    assert 0 < on_cpu.share.weight_bytes - hollow.stat().st_size < 0.03 * hollow.stat().st_size


def test_split_files_are_one_model(tmp_path: Path) -> None:
    weights = dict(random_weights(EXPERTS))
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "whole.gguf", EXPERTS, weights, lambda _: Kind.Q8_0)
    write_gguf(tmp_path / "parts" / "m-Q8_0.gguf", EXPERTS, weights, lambda _: Kind.Q8_0, split_max_tensors=9)
    whole, _ = both(tmp_path / "whole.gguf", "h200")
    file = local_gguf(f"{tmp_path / 'parts'}:q8_0")
    assert file is not None and file.name == "m-Q8_0-00001-of-00003.gguf"
    parts, _ = both(file, "h200")
    assert (parts.share.weight_bytes, parts.forms) == (whole.share.weight_bytes, whole.forms)
    assert parts.stored_bytes == sum(one.stat().st_size for one in file.parent.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:40], "is damaged or cut, at byte"),
        (lambda data: data[:-5000], "which .* are there: download it again"),
        (
            lambda data: data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"),
            "lacks the tensor|unexpected tensor",
        ),
    ],
)
def test_a_damaged_file_is_one_line(
    damage: Callable[[bytes], bytes], message: str, q4_k_m: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(q4_k_m.read_bytes()))
    assert main([str(path), "--device", "v6e"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and str(path) in error and error.count("\n") == 1


def test_a_file_of_the_hub_is_planned_if_it_is_here(
    q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options["local_files_only"]))
        if name == "owner/none":
            raise LocalEntryNotFoundError("nothing is there")
        return str(q4_k_m.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert find_config("owner/small:Q4_K_M") == ("owner/small:Q4_K_M", checkpoint.read_config(q4_k_m))
    assert local_gguf("owner/small:Q4_K_M") == q4_k_m
    assert main(["owner/none:Q4_K_M", "--device", "v6e"]) == 2
    assert "is a file of the hub that is not here, and nothing is downloaded" in capsys.readouterr().err
    assert asked == [("owner/small", True)] * 2 + [("owner/none", True)]
    assert local_gguf("owner/small") is None and local_gguf("demo") is None
