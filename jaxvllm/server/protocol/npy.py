"""Arrays in the bodies of requests: base64 of a .npy file, which `numpy.save` writes.

vLLM has files of `torch.save` there. To read these can execute code, and needs torch.
"""

import binascii
import math
from base64 import b64decode, b64encode
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from jaxvllm.core.errors import ParameterError

_FORM = "base64 of a .npy file of floats: base64.b64encode(file) of what numpy.save has written, without pickle"


def read_npy(text: str, field: str) -> NDArray[Any]:
    """Returns the array of numbers in `text`. Raises ParameterError, which names the request's `field`.

    It takes no more memory than the text, whatever the file says of its size.
    """
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:  # a character that is no ASCII
        raise ParameterError(f"{field} must be {_FORM}, and this is no base64: {error}", field) from error
    if data[:2] == b"PK":
        raise ParameterError(f"{field} must be {_FORM}, and not a file of torch.save or numpy.savez", field)
    stream = BytesIO(data)
    try:
        version = npy.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the format has names of columns")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, in_columns, dtype = read_header(stream)
        rest = data[stream.tell() :]
        if dtype.kind not in "fiub" or math.prod(shape) * dtype.itemsize != len(rest):
            raise ValueError(f"this has {len(rest)} bytes for {dtype} of shape {shape}; save it as float32")
        return np.frombuffer(rest, dtype).reshape(shape, order="F" if in_columns else "C")
    except Exception as error:  # NumPy reads the header as Python, and its sizes may be any
        raise ParameterError(f"{field} must be {_FORM}: {error}", field) from error


def write_npy(array: NDArray[np.generic]) -> str:
    """Returns an array as base64 of a .npy file."""
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    return b64encode(file.getvalue()).decode()
