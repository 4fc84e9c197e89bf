"""`CompressedScheme`: how a checkpoint of compressed-tensors stores the matrices that a quantization rounds.

The layout is that of compressed-tensors 0.17 (`compressors/`), which vLLM reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.forms import QUANTIZATIONS
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.scaled_groups import CODES, SCALES, ScaledGroups
from jaxvllm.models.forms.scaled_rows import rounded_by_row

_PER_WORD = 8  # integers of four bits


@dataclass(frozen=True)
class CompressedScheme:
    """Stores bytes with one scale a row, or integers of four bits in words with one scale for each group of a row.

    Values are rounded as an engine rounds them that is given the same `quantization`.
    """

    stored: StoredAs

    @classmethod
    def named(cls, quantization: str) -> Self:
        """Returns the scheme of a quantization that users may choose by name."""
        return cls(QUANTIZATIONS[quantization])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a matrix [out, in] can be stored so: its rows consist of whole groups, and are several.

        A single row, such as the gate of a shared expert, would be no linear layer that vLLM quantizes.
        """
        return shape[0] > 1 and shape[-1] % (self.stored.group or 1) == 0

    def settings(self, ignore: list[str]) -> dict[str, Any]:
        """Returns the quantization_config of a checkpoint whose linear layers are stored so, but for those to ignore.

        Bytes are published with activations that an engine rounds token by token, as ours does where the chip
        multiplies such codes.
        """
        code, group = self.stored.code, self.stored.group
        kind = "float" if code.name.startswith("float") else "int"
        bits = 8 // code.per_byte
        of_weights: dict[str, Any] = {
            "num_bits": bits,
            "type": kind,
            "symmetric": True,
            "strategy": "channel" if group is None else "group",
            "dynamic": False,
        }
        of_activations = None
        if group is not None:
            of_weights["group_size"] = group
        else:
            of_activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if code.per_byte > 1 else f"{kind}-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": of_weights, "input_activations": of_activations}
            },
            "ignore": ignore,
        }

    def declare(self, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the tensors that a matrix [out, in] is stored as, by the ends of their names."""
        out, size = shape
        if self.stored.group is None:
            return {
                "weight": jax.ShapeDtypeStruct(shape, jnp.dtype(self.stored.code.dtype)),
                "weight_scale": jax.ShapeDtypeStruct((out, 1), jnp.float32),
            }
        return {
            "weight_packed": jax.ShapeDtypeStruct((out, size // _PER_WORD), np.int32),
            "weight_scale": jax.ShapeDtypeStruct((out, size // self.stored.group), jnp.dtype(self.stored.scale_dtype)),
            "weight_shape": jax.ShapeDtypeStruct((2,), np.int64),
        }

    def encoded(self, matrix: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors that a matrix f[out, in] is stored as, by the ends of their names."""
        stored = self.stored
        if stored.group is None:
            values, scales = _by_row(matrix, stored.code)
            return {"weight": np.asarray(values), "weight_scale": np.asarray(scales)[:, None]}
        kept = _by_group(ScaledGroups(stored.code, stored.group, stored.scale_dtype), matrix)
        # The first of eight numbers has the lowest bits of a word, as it has of a byte.
        return {
            "weight_packed": np.asarray(kept[CODES]).view("<i4"),
            "weight_scale": np.asarray(kept[SCALES]),
            "weight_shape": np.array(matrix.shape),
        }


# These compile once for each shape, of which a model has few and tens of thousands of matrices.
_by_row = jax.jit(rounded_by_row, static_argnums=1)


@partial(jax.jit, static_argnums=0)
def _by_group(form: ScaledGroups, matrix: jax.Array) -> Mapping[str, jax.Array]:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return form.keep(matrix, {CODES: device, SCALES: device})
