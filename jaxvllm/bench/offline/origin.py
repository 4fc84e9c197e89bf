"""Records the origin of a figure: the date, the command, the versions and the device."""

import datetime
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from jaxvllm import __version__

PACKAGES = ("jax", "jaxlib", "numpy")


def origin(device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the entries that every result file has beside its figures.

    `device` describes where the figures were measured. None: the devices that jax finds in this process.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "device": _devices() if device is None else dict(device),
        "versions": {"jaxvllm": __version__, "python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
    }


def _devices() -> dict[str, Any]:
    import jax  # only here: some benchmarks measure other processes, and this one must not take their devices

    first = jax.devices()[0]
    return {"kind": first.device_kind, "platform": first.platform, "count": jax.device_count()}
