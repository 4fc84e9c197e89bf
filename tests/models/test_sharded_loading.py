"""Every device reads its own shard of a checkpoint, and nothing else is ever on the host."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.models import checkpoint, shards
from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.families import model_spec
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.mamba2 import Mamba2
from jaxvllm.models.params import Layout, Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.state_mixer import StateMixer
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.changed import changed
from tests.models.fixture import NAMES, Fixture
from tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("quick_fusions")

INDEX = "model.safetensors.index.json"
# What has numbers of heads.
type Heads = GroupedQueryAttention | LatentAttention | StateMixer
HEADS = (GroupedQueryAttention, LatentAttention, StateMixer)


def divisible(name: str) -> Fixture:
    """The fixture with an FFN that divides over 8 devices."""
    fixture = Fixture.load(name)
    if not (keys := {"intermediate_size", "n_inner", "ffn_dim"} & set(fixture.config)):
        return fixture  # it has experts alone, whose sizes divide
    [key] = keys
    size = fixture.config[key]
    wider = -(-size // 8) * 8
    sizes = {size: wider, 2 * size: 2 * wider}
    shapes = {
        tensor: [sizes.get(n, n) for n in shape]
        if any(part in tensor for part in (".mlp.", ".feed_forward.", ".fc1.", ".fc2."))
        else shape
        for tensor, shape in fixture.shapes.items()
    }
    return replace(fixture, config=fixture.config | {key: wider}, shapes=shapes)


def spread_by_hand(name: str, array: np.ndarray, spec: Heads, size: int) -> np.ndarray:
    """What `Spread` says in words, of one array of one layer, by padding and repeating."""
    if name in ("embed", "lm_head", "layer_embeddings"):
        return np.pad(array, ((0, -len(array) % size), (0, 0)))
    if isinstance(spec, Mamba2):
        copies, values = size // np.gcd(spec.num_groups, size), spec.scan.values
        if name in ("mamba_in", "mamba_in_bias", "mamba_taps", "mamba_taps_bias"):
            x, both = array[:, :values], array[:, values:]
            x = x.reshape(len(x) * copies, values // copies, *x.shape[2:])
            return np.concatenate([x, np.repeat(both, copies, axis=0)], axis=1)
        if SPLIT.get(name) == 0 and name.startswith("mamba_"):
            return array.reshape(len(array) * copies, array.shape[1] // copies, *array.shape[2:])
    if isinstance(spec, StateMixer):  # its heads divide as they are
        return array
    K = spec.num_kv_heads
    G = spec.num_heads // K
    copies = size // np.gcd(K, size)
    share = -(-G // copies)

    def query_heads(heads: np.ndarray) -> np.ndarray:  # [K, G, ...] -> [K * copies, share, ...]
        padding = [(0, 0), (0, copies * share - G), *[(0, 0)] * (heads.ndim - 2)]
        return np.pad(heads, padding).reshape(K * copies, share, *heads.shape[2:])

    match name:
        case "lm_head_bias":
            return np.pad(array, (0, -len(array) % size))
        case "q":
            of_heads = query_heads(array.reshape(K, G, -1, array.shape[-1]))
            return of_heads.reshape(K * copies, -1, array.shape[-1])
        case "k_up" | "v_up":
            return query_heads(array)
        case "qkv" | "qkv_bias":
            assert isinstance(spec, GroupedQueryAttention)
            D, P = spec.head_size, 2 if spec.gated else 1  # a head of queries, and its gate
            own = array.shape[1] // D - G * P  # key and value, or only a key, or none of them
            heads = array.reshape(K, G * P + own, D, -1)
            queries = query_heads(heads[:, : G * P].reshape(K, G, P * D, -1)).reshape(K * copies, share * P, D, -1)
            both = [queries, np.repeat(heads[:, G * P :], copies, axis=0)]
            return np.concatenate(both, axis=1).reshape(K * copies, (share * P + own) * D, *array.shape[2:])
        case "o":
            heads = np.moveaxis(array.reshape(len(array), K, G, -1), 0, -1)
            return np.moveaxis(query_heads(heads), -1, 0).reshape(len(array), -1)
        case "sinks" | "head_gates":
            return query_heads(array)
        case "q_norm" if normed_by_head(spec):
            return query_heads(array)
        case "k_norm" if normed_by_head(spec):
            return np.repeat(array, copies, axis=0)
    return array


def normed_by_head(spec: Heads) -> bool:
    """Whether the weights of the norms of queries and keys are those of heads."""
    return isinstance(spec, GroupedQueryAttention) and spec.qk_norm in ("own", "full")


# Which dimension of an array is split; of the others every device has all.
SPLIT = {
    "embed": 0,
    "lm_head_bias": 0,
    "sinks": 0,
    "head_gates": 0,
    "experts_gate_up_bias": 2,
    "layer_embeddings": 0,
    "lm_head": 0,
    "q": 0,
    "k_up": 0,
    "v_up": 0,
    "qkv": 0,
    "qkv_bias": 0,
    "o": 1,
    "gate_up": 1,
    "gate_up_bias": 1,
    "down": 1,
    "up": 0,
    "up_bias": 0,
    "experts_gate_up": 2,
    "experts_down": 2,
    "experts_up": 1,
    "shared_gate_up": 1,
    "shared_up": 0,
    "shared_down": 1,
    "delta_in": 0,
    "delta_steps": 0,
    "delta_conv": 0,
    "delta_decay": 0,
    "delta_step_bias": 0,
    "delta_out": 1,
    "kda_in": 0,
    "kda_conv": 0,
    "kda_decay": 0,
    "kda_step_bias": 0,
    "kda_forget": 0,
    "kda_gate": 0,
    "kda_out": 1,
    "mamba_gates": 0,
    "mamba_gates_bias": 0,
    "mamba_in": 0,
    "mamba_in_bias": 0,
    "mamba_steps": 0,
    "mamba_steps_bias": 0,
    "mamba_taps": 0,
    "mamba_taps_bias": 0,
    "mamba_decay": 0,
    "mamba_skip": 0,
    "mamba_dt_bias": 0,
    "mamba_norm": 0,
    "mamba_out": 1,
    "mamba1_in": 0,
    "mamba1_in_bias": 0,
    "mamba1_told": 1,
    "mamba1_steps": 0,
    "mamba1_dt_bias": 0,
    "mamba1_decay": 0,
    "mamba1_skip": 0,
    "mamba1_taps": 0,
    "mamba1_taps_bias": 0,
    "mamba1_out": 1,
    "conv_in": 0,
    "conv_in_bias": 0,
    "conv_taps": 0,
    "conv_taps_bias": 0,
    "conv_out": 1,
}


def layers_of(params: Params, num_layers: int) -> list[dict[str, jax.Array]]:
    layers = params["layers"]
    if isinstance(layers, list):
        return layers
    return [{name: stack[i] for name, stack in layers.items()} for i in range(num_layers)]


def check(name: str, got: jax.Array, canonical: jax.Array, spec: Heads, size: int) -> None:
    expected = spread_by_hand(name, np.asarray(canonical), spec, size)
    np.testing.assert_array_equal(np.asarray(got), expected, err_msg=name)
    axis = 0 if name in ("q_norm", "k_norm") and normed_by_head(spec) else SPLIT.get(name)
    if axis is None:
        assert got.sharding.is_fully_replicated, name
        return
    shards = np.split(expected, size, axis)
    for shard, mine in zip(got.addressable_shards, shards, strict=True):
        np.testing.assert_array_equal(np.asarray(shard.data), mine, err_msg=name)


def check_spread(directory: Path, spec: ModelSpec, size: int, layout: Layout, **options: Any) -> None:
    """On a mesh of `size`, the arrays of one device, spread by hand."""
    one = checkpoint.load(directory, spec, dtype=jnp.float32, layout="separate", **options)
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    many = checkpoint.load(directory, spec, dtype=jnp.float32, layout=layout, mesh=mesh, **options)
    assert set(many) == set(one)
    first = spec.layers[0].attention
    assert isinstance(first, HEADS)
    for name in set(one) - {"layers"}:
        check(name, many[name], one[name], first, size)
    for layer, got, canonical in zip(spec.layers, layers_of(many, spec.num_layers), one["layers"], strict=True):
        assert set(got) == set(canonical)
        for name in got:
            is_beside = layer.beside is not None and name in layer.beside.declare()
            heads = layer.beside if is_beside else layer.attention
            assert isinstance(heads, HEADS)
            check(name, got[name], canonical[name], heads, size)


# What models say whose heads do not divide over 8 devices.
_DELTA = "heads of linear attention do not divide"
TOO_MANY_DEVICES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _DELTA),
    "mamba2": "3 groups of Mamba-2 of 4 heads do not divide",
    "nemotron_h": "2 groups of Mamba-2 of 6 heads do not divide",
    "bamba": "2 groups of Mamba-2 of 6 heads do not divide",
}


@pytest.mark.parametrize("name", NAMES)
def test_every_shard_of_every_family(name: str, tmp_path: Path) -> None:
    fixture = divisible(name)
    spec = model_spec(fixture.config, fixture.max_model_len)
    directory = fixture.write_checkpoint(tmp_path)
    for size in (2, 8):  # the logits over four devices are compared
        norms_all = getattr(spec.layers[0].attention, "qk_norm", "") == "full"
        if size == 8 and (norms_all or name in TOO_MANY_DEVICES):
            refused = TOO_MANY_DEVICES.get(name, "norms all of them together")
            with pytest.raises(ValueError, match=f"{refused}.*: use a mesh of 1x1, 1x2"):
                check_spread(directory, spec, size, "separate")
        else:
            check_spread(directory, spec, size, "separate")


# Fused; 7 query heads over one KV head; biases.
@pytest.mark.parametrize(("name", "size"), [("phi3", 4), ("llama", 8), ("llama-bias", 2)])
def test_stacked_layers_are_filled_shard_by_shard(name: str, size: int, tmp_path: Path) -> None:
    fixture = divisible(name)
    check_spread(fixture.write_checkpoint(tmp_path), model_spec(fixture.config), size, "stacked")


def test_three_kv_heads_over_two_devices_and_dummy_weights(tmp_path: Path) -> None:
    # A device's heads then belong to two KV heads, one of them shared with its neighbour.
    heads = {"num_heads": 15, "num_kv_heads": 3}
    spec = replace(changed(model_spec(divisible("llama-bias").config), heads), vocab_size=13)
    for size in (2, 4):
        check_spread(tmp_path, spec, size, "separate", load_format="dummy", seed=5)


@pytest.mark.parametrize("form", ["safetensors", "orbax", "dummy"])
def test_each_stage_has_its_layers_and_reads_no_others(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = divisible("llama")  # three layers: the second stage has one, and room for another
    spec, directory = model_spec(fixture.config), fixture.write_checkpoint(tmp_path / "model")
    if form == "orbax":
        checkpoint.convert(directory, tmp_path / "out", dtype="auto", mesh=make_mesh(MeshShape(1, 1), jax.devices()))
        directory = tmp_path / "out"
    read: Counter[tuple[tuple[int, ...], int | None]] = Counter()

    def watched(*args: Any, make: Any = shards.read_shards) -> Any:
        parts = make(*args)

        def watched_parts(name: str, decl: Any, layer: int | None) -> Any:
            if name == "qkv":
                read[tuple(device.id for device in args[4](decl).mesh.devices.flat), layer] += 1
            return parts(name, decl, layer)

        return watched_parts

    monkeypatch.setattr(checkpoint, "read_shards", watched)
    options: dict[str, Any] = dict(dtype=jnp.float32, layout="stacked")
    options["load_format"] = "dummy" if form == "dummy" else "auto"
    one = checkpoint.load(directory, spec, mesh=make_mesh(MeshShape(1, 2), jax.devices()), **options)
    read.clear()
    mesh = make_mesh(MeshShape(data=1, model=2, stages=2), jax.devices())
    staged = checkpoint.load(directory, spec, mesh=mesh, **options)
    assert read == ({} if form == "orbax" else {((0, 1), 0): 1, ((0, 1), 1): 1, ((2, 3), 2): 1})
    assert staged.keys() == one.keys() and staged["layers"].keys() == one["layers"].keys()
    for name in one.keys() - {"layers"}:
        np.testing.assert_array_equal(np.asarray(staged[name]), np.asarray(one[name]), err_msg=name)
        assert {shard.device.id for shard in staged[name].addressable_shards} == {0, 1, 2, 3}
    for name, stack in staged["layers"].items():
        whole = np.asarray(stack)
        np.testing.assert_array_equal(whole[:3], np.asarray(one["layers"][name]), err_msg=name)
        assert whole.shape[0] == 4 and not whole[3].any()
        for shard in stack.addressable_shards:
            assert shard.index[0] == (slice(0, 2) if shard.device.id in (0, 1) else slice(2, 4)), name


def test_stages_need_stacked_layers(tmp_path: Path) -> None:
    spec, mesh = model_spec(Fixture.load("llama").config), make_mesh(MeshShape(1, 1, stages=2), jax.devices())
    with pytest.raises(ValueError, match="layers of a mesh with stages must be stacked"):
        checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate", load_format="dummy", mesh=mesh)


def test_an_orbax_tree_is_not_for_stages_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "orbax").mkdir()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    spec, mesh = model_spec(Fixture.load("llama").config), make_mesh(MeshShape(1, 1, stages=2), jax.devices())
    with pytest.raises(NotImplementedError, match="cannot be read in stages by several processes: give the safe"):
        checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="stacked", mesh=mesh)


def write_large(directory: Path) -> tuple[int, int]:
    """A checkpoint of 220 MB in four files; the bytes of all tensors, and of the largest."""
    E, F, V, H, K, D = 1024, 6144, 6151, 8, 2, 128
    sizes = dict(vocab_size=V, hidden_size=E, intermediate_size=F, num_hidden_layers=2, head_dim=D)
    sizes |= dict(num_attention_heads=H, num_key_value_heads=K, max_position_embeddings=64)
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    files: dict[str, dict[str, tuple[int, ...]]] = {
        "embed": {"model.embed_tokens.weight": (V, E)},
        "head": {"lm_head.weight": (V, E), "model.norm.weight": (E,)},
    }
    for i in range(2):
        shapes = {"q": (H * D, E), "k": (K * D, E), "v": (K * D, E), "o": (E, H * D)}
        layer = {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
        layer |= {"mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F)}
        layer |= {"input_layernorm": (E,), "post_attention_layernorm": (E,)}
        files[f"layer{i}"] = {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    stream = np.random.default_rng(0)
    for file, shapes in files.items():
        tensors = {name: stream.random(shape, np.float32) for name, shape in shapes.items()}
        save_file(tensors, directory / f"{file}.safetensors")
    weight_map = {name: f"{file}.safetensors" for file, shapes in files.items() for name in shapes}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    sizes_of = [4 * int(np.prod(shape)) for shapes in files.values() for shape in shapes.values()]
    return sum(sizes_of), max(sizes_of)


MEMORY = """
import json, sys, threading, time
from pathlib import Path
import jax, jax.numpy as jnp
from jaxvllm.models import checkpoint, safetensors_files
from jaxvllm.models.families import model_spec
from jaxvllm.models.state_mixer import StateMixer
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.changed import changed


def on_host():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def on_devices():
    # A shard and the array that it is of share their memory.
    shards = (shard.data for array in jax.live_arrays() for shard in array.addressable_shards)
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


beside, total = [], []


def sample():
    # On a busy machine a thread of XLA's is late to let go; and jax frees what it took from NumPy when next called.
    for _ in range(3000):
        held = on_host() - on_devices()
        if layout == "separate" or held - before < limit:
            break
        time.sleep(0.01)
        jax.device_put(0)
    beside.append(held)


def watched_copied(array, copied=safetensors_files.copied):
    fill = copied(array)

    def watched_fill(out, start):
        fill(out, start)
        sample()

    return watched_fill


def watched_make(*args, make=jax.make_array_from_callback):
    array = make(*args)
    sample()
    return array


def watch(done):
    while not done.wait(0.002):
        total.append(on_host())


safetensors_files.copied, jax.make_array_from_callback = watched_copied, watched_make
directory, limit = Path(sys.argv[1]), float(sys.argv[2])
spec = model_spec(checkpoint.read_config(directory))
for size, layout in ((1, "separate"), (8, "separate"), (1, "stacked"), (2, "stacked"), (8, "stacked")):
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    for _ in range(2):  # the first load's programs stay
        params = None
        jax.block_until_ready(jnp.zeros(3) + 1)  # jax frees what it took from NumPy when it is next called
        beside, total, before, done = [], [], on_host() - on_devices(), threading.Event()
        (thread := threading.Thread(target=watch, args=[done])).start()
        params = jax.block_until_ready(checkpoint.load(directory, spec, dtype=jnp.float32, layout=layout, mesh=mesh))
        done.set()
        thread.join()
    print(json.dumps([size, layout, max(beside) - before, max(total) - before - on_devices()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_host_holds_one_tensor_beside_what_is_on_devices(tmp_path: Path) -> None:
    whole, largest = write_large(tmp_path)
    assert whole > 8 * largest
    # glibc then gives back what is freed, and its pools say nothing about us.
    env = os.environ | {"PYTHONPATH": ".", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    argv = [sys.executable, "-c", MEMORY, str(tmp_path), str(1.2 * largest)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        size, layout, beside, beyond = json.loads(line)
        # In the separate layout what is read becomes the array, gate and up together: nothing comes on top.
        assert (beside if layout == "stacked" else beyond) < 1.2 * largest, line
