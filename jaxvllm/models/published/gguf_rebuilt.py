"""The tensors that GGUF files have otherwise than checkpoints of Hugging Face, and how they are made again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvllm.models.published.gguf_architecture import RebuiltTensor
from jaxvllm.models.published.shaped_part import ShapedPart, concatenated

_Make = Callable[[Sequence[ShapedPart], Mapping[str, Any]], ShapedPart]


def _logarithm(parts: Sequence[ShapedPart], _: Mapping[str, Any]) -> ShapedPart:
    """Returns a, of which a file has -exp(a)."""
    [decay] = parts
    return decay.mapped(lambda values: np.log(-values))


def _of_keys_and_values(parts: Sequence[ShapedPart], _: Mapping[str, Any]) -> ShapedPart:
    """Returns the rows of each head, its key's and then its value's. A file has the matrices of keys turned."""
    keys, values = parts
    return concatenated([keys.turned, values], axis=1).merged


def _flat(parts: Sequence[ShapedPart], _: Mapping[str, Any]) -> ShapedPart:
    return parts[0].flat


def _in_one(axis: int, are_turned: bool = False) -> _Make:
    """Returns the function that puts tensors one after another."""

    def make(parts: Sequence[ShapedPart], _: Mapping[str, Any]) -> ShapedPart:
        return concatenated([part.turned for part in parts] if are_turned else parts, axis)

    return make


def _turned(parts: Sequence[ShapedPart], _: Mapping[str, Any]) -> ShapedPart:
    return parts[0].turned


def _by_key_head(parts: Sequence[ShapedPart], values: Mapping[str, Any]) -> ShapedPart:
    """Returns the rows by key head: its query, its key, the values and the gates of its value heads.

    A file has all queries first, then all keys, and so on.
    """
    K, per_key, key_size, value_size = _linear_sizes(values)
    sizes = (key_size, key_size, per_key * value_size, per_key * value_size)
    whole = concatenated(parts, axis=0)
    _check_size(whole, 0, K * sum(sizes))
    starts = np.cumsum((0, *(K * size for size in sizes[:-1])))
    kinds = [start + np.arange(K * size).reshape(K, size) for start, size in zip(starts, sizes, strict=True)]
    return whole.ordered(0, np.concatenate(kinds, axis=1).reshape(-1))


def _grouped(axis: int, has_keys: bool = False, is_by_head: bool = False, then: _Make | None = None) -> _Make:
    """Returns the function that groups value heads by their key heads again.

    A file has the first value head of each key head, then the second one of each, and so on.

    has_keys: there are queries and keys before the values
    is_by_head: a value head has one element, and not as many as its size
    """

    def make(parts: Sequence[ShapedPart], values: Mapping[str, Any]) -> ShapedPart:
        K, per_key, key_size, value_size = _linear_sizes(values)
        size = 1 if is_by_head else value_size
        before = 2 * K * key_size if has_keys else 0
        whole = parts[0] if then is None else then(parts, values)
        _check_size(whole, axis, before + per_key * K * size)
        stored = np.arange(per_key * K * size).reshape(per_key, K, size).swapaxes(0, 1).reshape(-1)
        places = np.concatenate([np.arange(before), before + stored])
        return whole.ordered(axis, places)

    return make


def _linear_sizes(values: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Returns the key heads of linear attention, the value heads of each, and the sizes of either."""
    keys = ("ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size")
    if any(type(values[key]) is not int or values[key] < 1 for key in keys):
        raise ValueError(f"{', '.join(keys)} are {', '.join(repr(values[key]) for key in keys)}, and must be above 0")
    K, V, key_size, inner_size = (values[key] for key in keys)
    return K, V // K, key_size, inner_size // V


def _check_size(tensor: ShapedPart, axis: int, expected: int) -> None:
    """Raises ValueError for another size. Metadata may state any: no list of places is made before."""
    if len(tensor.shape) <= axis or tensor.shape[axis] != expected:
        raise ValueError(f"a tensor of shape {tensor.shape} should have {expected} elements along axis {axis}")


LATENT = {"self_attn.kv_b_proj.weight": RebuiltTensor(("attn_k_b.weight", "attn_v_b.weight"), _of_keys_and_values)}
LLAMA4 = {
    "feed_forward.experts.gate_up_proj": RebuiltTensor(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"), _in_one(axis=2, are_turned=True)
    ),
    "feed_forward.experts.down_proj": RebuiltTensor(("ffn_down_exps.weight",), _turned),
}
GRANITE_MOE = {
    "block_sparse_moe.input_linear.weight": RebuiltTensor(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"), _in_one(axis=1)
    ),
}
# Tensors of Mamba-2, by their names in a mixer. A file has the norm by groups.
_MAMBA2 = {
    "A_log": RebuiltTensor(("ssm_a",), lambda parts, values: _logarithm(parts, values).flat),
    "D": RebuiltTensor(("ssm_d",), _flat),
    "norm.weight": RebuiltTensor(("ssm_norm.weight",), _flat),
}
MAMBA2 = {f"mixer.{name}": tensor for name, tensor in _MAMBA2.items()}
# Of Mamba, each channel has a row of decays.
_MAMBA = {"A_log": RebuiltTensor(("ssm_a",), _logarithm), "D": _MAMBA2["D"]}
MAMBA = {f"mixer.{name}": tensor for name, tensor in _MAMBA.items()}
JAMBA = {f"mamba.{name}": tensor for name, tensor in _MAMBA.items()}
# The norm before the FFN has no kind in its name.
FALCON_H1 = {
    **{f"mamba.{name}": tensor for name, tensor in _MAMBA2.items()},
    "pre_ff_layernorm.weight": RebuiltTensor(("ffn_norm",), _flat),
}
KIMI_LINEAR = {
    **LATENT,
    "self_attn.A_log": RebuiltTensor(("ssm_a",), _logarithm),
    **{
        f"self_attn.{letter}_conv1d.weight": RebuiltTensor((f"ssm_conv1d_{letter}.weight",), lambda parts, _: parts[0])
        for letter in "qkv"
    },
}
GRANITE_HYBRID = {
    **GRANITE_MOE,
    **{f"mamba.{name}": tensor for name, tensor in _MAMBA2.items()},
    "shared_mlp.input_linear.weight": RebuiltTensor(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), _in_one(axis=0)),
}
# Without experts, what is beside them is the FFN.
GRANITE_HYBRID_DENSE = {
    **GRANITE_HYBRID,
    "shared_mlp.input_linear.weight": RebuiltTensor(("ffn_gate.weight", "ffn_up.weight"), _in_one(axis=0)),
}
QWEN3_NEXT = {
    "linear_attn.in_proj_qkvz.weight": RebuiltTensor(("attn_qkv.weight", "attn_gate.weight"), _by_key_head),
    "linear_attn.A_log": RebuiltTensor(("ssm_a",), _logarithm),
}
QWEN3_5 = {
    "linear_attn.in_proj_qkv.weight": RebuiltTensor(("attn_qkv.weight",), _grouped(axis=0, has_keys=True)),
    "linear_attn.in_proj_z.weight": RebuiltTensor(("attn_gate.weight",), _grouped(axis=0)),
    "linear_attn.in_proj_a.weight": RebuiltTensor(("ssm_alpha.weight",), _grouped(axis=0, is_by_head=True)),
    "linear_attn.in_proj_b.weight": RebuiltTensor(("ssm_beta.weight",), _grouped(axis=0, is_by_head=True)),
    "linear_attn.conv1d.weight": RebuiltTensor(("ssm_conv1d.weight",), _grouped(axis=0, has_keys=True)),
    "linear_attn.out_proj.weight": RebuiltTensor(("ssm_out.weight",), _grouped(axis=1)),
    "linear_attn.dt_bias": RebuiltTensor(("ssm_dt.bias",), _grouped(axis=0, is_by_head=True)),
    "linear_attn.A_log": RebuiltTensor(("ssm_a",), _grouped(axis=0, is_by_head=True, then=_logarithm)),
}
