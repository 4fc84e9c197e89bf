"""Panels of codes in words of NumPy: the matrix that they are, and what tokens are rounded to."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.integer_matmul import CodePanels
from pallas_kernels.packed_matmul.panels import Panels
from pallas_kernels.quantized_matmul.code import E4M3


def unpacked_codes(
    panels: CodePanels, arrays: Mapping[str, NDArray[np.uint8]], outs: int, ins: int
) -> NDArray[np.uint8]:
    """The codes [.., outs, ins], by what `CodePanels` says of bytes."""
    codes = np.asarray(arrays["codes"])
    if panels.bits == 8:
        return Panels(panels.columns, panels.unit).unpacked(codes, outs, ins)
    found = Panels(panels.columns, 8).unpacked(np.concatenate([codes & 15, codes >> 4], -1), outs, ins)
    if panels.bits == 4:
        return found
    extra = panels.bits - 4
    words = np.asarray(arrays["high"])
    places = [words >> (extra * place) & (2**extra - 1) for place in range(panels.unit // 4)]
    high = Panels(panels.columns, panels.unit).unpacked(np.concatenate(places, -1), outs, ins)
    return found | high << 4


def matrix(panels: CodePanels, arrays: Mapping[str, NDArray[np.uint8]], outs: int, ins: int) -> NDArray[np.float64]:
    """The matrix [.., outs, ins] that the arrays are."""

    def of_inputs(name: str, group: int | None, dtype: str | None = None) -> NDArray[np.float64]:
        array = np.asarray(arrays[name])
        rows = np.swapaxes(array, -1, -2)
        rows = rows.reshape(*array.shape[:-3], -1, array.shape[-2])[..., :outs, :]
        numbers = np.ascontiguousarray(rows).view(jnp.dtype(dtype or array.dtype)).astype(np.float64)
        return np.repeat(numbers, group or ins, -1)[..., :ins]

    codes = unpacked_codes(panels, arrays, outs, ins)
    zeros = of_inputs("zeros", panels.group) if panels.offsets == "zeros" else panels.zero
    if panels.looked_up is not None or panels.is_float8:
        numbers = (panels.looked_up or E4M3).table[codes].astype(np.float64)
    else:
        numbers = codes - np.float64(zeros)
    scales = of_inputs("scales", panels.group, panels.scale_dtype)
    if panels.span is not None:
        scales = scales * of_inputs("factors", panels.span)
    if panels.offsets != "mins":
        return numbers * scales
    mins = of_inputs("mins", panels.group)
    return numbers * scales - (mins if panels.span is None else mins * of_inputs("min_factors", panels.span))


def rounded(x: NDArray[np.float32], together: int | None) -> NDArray[np.float64]:
    """What tokens [T, in] are rounded to."""
    ins = x.shape[1]
    result = np.zeros(x.shape)
    for first in range(0, ins, together or ins):
        group = x[:, first : first + (together or ins)].astype(np.float32)
        sizes = np.maximum(np.abs(group).max(1, keepdims=True) * np.float32(1 / 127), np.finfo(np.float32).tiny)
        sizes[np.abs(group).max(1) == 0] = 1
        result[:, first : first + group.shape[1]] = np.rint(group / sizes) * sizes.astype(np.float64)
    return result
