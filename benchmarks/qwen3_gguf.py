"""A GGUF file of a model of the Qwen3 family with random weights, for benchmarks."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from benchmarks.qwen3 import random_weights, weight_shapes

# The places in a block of its numbers in half precision: scales, and what is subtracted.
_HALVES = {Kind.Q4_K: ((0, 2e-4), (2, 1e-3)), Kind.Q6_K: ((208, 2e-5),)}


def write_gguf(path: Path, config: dict[str, Any]) -> None:
    """Writes the `random_weights` of `config`: matrices in the dtype that it states, norms and routers in float32."""
    writer = gguf_writer(path, config)
    names = _names(config)
    experts: list[np.ndarray] = []
    for name, tensor in random_weights(config):
        if ".experts." in name:  # a file has them together: gate, up and down of each expert follow one another here
            experts.append(tensor)
            if len(experts) == 3 * config["num_experts"]:
                for index, of in enumerate(("gate_proj", "up_proj", "down_proj")):
                    prefix = name.partition(".experts.")[0]
                    _add_matrices(writer, names(f"{prefix}.experts.{of}"), np.stack(experts[index::3]))
                experts = []
        elif tensor.ndim == 1 or name.endswith("mlp.gate.weight"):
            writer.add_tensor(names(name), tensor.astype(np.float32))
        else:
            _add_matrices(writer, names(name), tensor)
    _write(writer)


def write_q4_k_m(path: Path, config: dict[str, Any]) -> None:
    """Writes random weights, in the types that llama.cpp's Q4_K_M gives them, and a vocabulary of byte-level BPE.

    The model has no experts.
    """
    writer = gguf_writer(path, config)
    writer.add_file_type(15)
    random = np.random.default_rng(0)
    for name, shape, kind in q4_k_m_tensors(config):
        data = np.ones(shape, np.float32) if kind == Kind.F32 else _blocks(random, shape, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    _write(writer)


def q4_k_m_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Yields the name in a file, the shape and the type of each tensor.

    Q4_K_M has the embedding, and the values and the down projections of half of the layers, in Q6_K.
    """
    layers, names = config["num_hidden_layers"], _names(config)
    for name, shape in weight_shapes(config).items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        is_large = name.endswith(("v_proj.weight", "down_proj.weight")) and (
            layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        )
        kind = Kind.Q6_K if is_large or name == "model.embed_tokens.weight" else Kind.Q4_K
        yield names(name), shape, Kind.F32 if len(shape) == 1 else kind


def gguf_writer(path: Path, config: dict[str, Any]) -> gguf.GGUFWriter:
    """Returns the writer of a file that has its metadata and vocabulary, and no tensors yet."""
    writer = gguf.GGUFWriter(path, _architecture(config))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if num_experts := config.get("num_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _add_vocabulary(writer, config["vocab_size"])
    return writer


def _architecture(config: dict[str, Any]) -> str:
    return str(config["model_type"]).replace("_", "")


def _names(config: dict[str, Any]) -> Callable[[str], str]:
    """Returns the function from the name of a tensor in a checkpoint to its name in a file."""
    [architecture] = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == _architecture(config)]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])

    def name_of(name: str) -> str:
        return f"{names.get_name(name.removesuffix('.weight'))}.weight"

    return name_of


def _add_matrices(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray) -> None:
    kind = Kind.F32 if tensor.dtype == np.float32 else Kind.BF16
    writer.add_tensor(name, tensor.view(np.uint8), raw_dtype=kind)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(random: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Returns rows of random blocks, u8[rows, bytes]."""
    count, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.frombuffer(random.bytes(shape[0] * shape[1] // count * size), np.uint8).reshape(-1, size).copy()
    for place, scale in _HALVES[kind]:
        data[:, place : place + 2] = np.full((len(data), 1), scale, np.float16).view(np.uint8)
    return data.reshape(shape[0], -1)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Adds a vocabulary of so many tokens: all bytes, and then pairs and threes of them, which merges make."""
    letters = [chr(number) for number in (*range(33, 127), *range(161, 173), *range(174, 324))]
    tokens, merges = list(letters), []
    for merge in _merges(letters):
        if len(tokens) == size:
            break
        tokens.append("".join(merge))
        merges.append(" ".join(merge))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(size - 1)


def _merges(letters: list[str]) -> Iterator[tuple[str, str]]:
    yield from product(letters, letters)
    for left, right in product(product(letters, letters), letters):
        yield "".join(left), right
