"""Records the origin of a figure: the date, the command, the versions and the device."""

import datetime
import platform
import shlex
import sys
from importlib.metadata import version
from typing import Any

import jax

from jaxvllm import __version__

PACKAGES = ("jax", "jaxlib", "numpy")


def origin() -> dict[str, Any]:
    """Returns the entries that every result file has beside its figures."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "device": {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()},
        "versions": {"jaxvllm": __version__, "python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
    }
