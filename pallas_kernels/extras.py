"""Hints for installing what an optional feature needs: the packages of an extra."""

import importlib.util
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires

_REQUIREMENT = re.compile(r"""(?P<package>[^;]+?)\s*;\s*extra == ['"](?P<extra>\w+)['"]""")


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of jaxvllm's extra `extra` where this Python finds them.

    It names the packages themselves, so that it fits a clone as well as a wheel, and uses uv where there is no pip.
    """
    python = shlex.quote(sys.executable)
    has_pip = importlib.util.find_spec("pip") is not None
    command = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    return f"{command} {' '.join(map(shlex.quote, _packages(extra)))}"


def _packages(extra: str) -> list[str]:
    """Returns what an extra requires, or the extra itself where jaxvllm is not installed but only lies there."""
    try:
        requirements = requires("jaxvllm") or []
    except PackageNotFoundError:
        requirements = []
    matches = map(_REQUIREMENT.fullmatch, requirements)
    return [match["package"] for match in matches if match and match["extra"] == extra] or [f".[{extra}]"]
