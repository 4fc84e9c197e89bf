"""Writes tests/models/published/mlx_modes.npz: matrices that MLX itself has quantized, and what it takes them for.

It runs in an environment with the package `mlx[cpu]` (0.32.4 made the file) and imports nothing of this repository:

    python tools/make_mlx_fixtures.py
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

PATH = Path(__file__).resolve().parent.parent / "tests" / "models" / "published" / "mlx_modes.npz"
MODES = (("affine", 4, 64), ("affine", 3, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))


def main() -> None:
    mx.random.seed(0)
    arrays: dict[str, Any] = {}
    for mode, bits, group in MODES:
        # Groups of very different sizes.
        matrix = mx.random.normal((6, 128)) * mx.exp(3 * mx.random.normal((6, 1)))
        parts = mx.quantize(matrix.astype(mx.float32), group, bits, mode)
        values = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode).astype(mx.float32)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
            arrays[f"{mode}-{bits}-{group}.{part}"] = np.array(array)
        arrays[f"{mode}-{bits}-{group}.values"] = np.array(values)
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
