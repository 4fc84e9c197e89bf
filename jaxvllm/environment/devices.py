"""Prints the devices that jax finds as JSON. It has a process of its own, because a driver may hang or end it."""

import json
import logging
import sys
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.chips import CHIPS

DTYPES = ("float32", "bfloat16", "float16")


def devices_found() -> dict[str, Any]:
    """Returns the devices by kind, their driver, and the attention backend that `auto` chooses for each dtype.

    Heads that this backend has no kernel for are left to plain XLA (`backend_for`).
    """
    devices = jax.devices()
    first = devices[0]
    known = [chip.name for chip in CHIPS.values() if chip.device_kind == first.device_kind]
    stats = first.memory_stats() if first.platform != "cpu" else None
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
        "driver": " ".join(first.client.platform_version.split()),
        "chip": known[0] if known else None,
        "memory_bytes": stats.get("bytes_limit") if stats else None,
        "attention": {dtype: _attention(first, dtype) for dtype in DTYPES},
    }


def _attention(device: jax.Device, dtype: str) -> dict[str, str | None]:
    reasons = _Reasons()
    logger = logging.getLogger("pallas_kernels.backend")
    logger.addHandler(reasons)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        backend = Backend.of_device("auto", device, jnp.dtype(dtype))
    finally:
        logger.removeHandler(reasons)
    chip = None if backend.chip is None else backend.chip.name
    return {"backend": backend.kind, "chip": chip, "why": " ".join(reasons.messages) or None}


class _Reasons(logging.Handler):
    """Keeps what `Backend.of_device` logs about its choice."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


if __name__ == "__main__":
    # The last line is the result: plugins may print before it.
    sys.stdout.write("\n" + json.dumps(devices_found()) + "\n")
