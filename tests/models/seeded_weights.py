"""Random weights from a seed, the same wherever NumPy runs: here, and beside transformers in make_fixtures."""

import hashlib
from collections.abc import Mapping

import numpy as np


def seeded_weights(shapes: Mapping[str, list[int]], seed: int, norm_offset: float) -> dict[str, np.ndarray]:
    """float32 tensors by name. Norms are near 1 - norm_offset; everything is large enough to matter.

    Each tensor has its own stream, so that no tensor's values depend on which others there are.
    """
    return {name: _tensor(name, tuple(shapes[name]), seed, norm_offset) for name in sorted(shapes)}


def _tensor(name: str, shape: tuple[int, ...], seed: int, norm_offset: float) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    stream = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    values = stream.standard_normal(shape, dtype=np.float32)
    is_norm = "norm" in name or ".ln_" in name
    if not shape:  # a number, such as the slope of an activation
        return np.asarray(0.5, np.float32)
    if is_norm and name.endswith("bias"):
        return np.float32(0.1) * values
    if is_norm:
        # The norm of linear attention has no offset, whatever the others have.
        norm_offset = 0.0 if "linear_attn" in name else norm_offset
        return np.float32(1 - norm_offset) + np.float32(0.2) * values
    if name.endswith("bias"):
        return np.float32(0.3) * values
    if "embed_tokens" in name or name.endswith(("wte.weight", "wpe.weight", "embed_in.weight")):
        return np.float32(0.1) * values
    # Twice the usual: attention and FFN then outweigh the embedding, and greedy tokens do not just repeat.
    # Some tensors of heads end with dimensions of 1.
    width = [1, *(n for n in shape if n > 1)][-1]
    return np.float32(2 * width**-0.5) * values
