"""A GGUF file of a model of the Qwen3 family with random weights, for benchmarks."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

# The places in a block of its numbers in half precision: scales, and what is subtracted.
_HALVES = {Kind.Q4_K: ((0, 2e-4), (2, 1e-3)), Kind.Q6_K: ((208, 2e-5),)}


def write_q4_k_m(path: Path, config: dict[str, Any]) -> None:
    """Writes random weights, in the types that llama.cpp's Q4_K_M gives them, and a vocabulary of byte-level BPE.

    Q4_K_M has the embedding, and the values and the down projections of half of the layers, in Q6_K.
    """
    layers, hidden, head = config["num_hidden_layers"], config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    ffn = config["intermediate_size"]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(15)
    _add_vocabulary(writer, config["vocab_size"])
    shapes = {"token_embd": (config["vocab_size"], hidden), "output_norm": (hidden,)}
    of_layer = {
        "attn_norm": (hidden,),
        "attn_q": (heads * head, hidden),
        "attn_k": (kv_heads * head, hidden),
        "attn_v": (kv_heads * head, hidden),
        "attn_output": (hidden, heads * head),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        is_large = name.endswith(("attn_v", "ffn_down")) and (
            layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        )
        kind = Kind.Q6_K if is_large or name == "token_embd" else Kind.Q4_K
        writer.add_tensor(f"{name}.weight", _blocks(random, shape, kind), raw_dtype=kind)
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
