"""What a client's script prints: one JSON object, a key a check."""

import json
from collections.abc import Callable, Mapping
from typing import Any


def report(checks: Mapping[str, Callable[[], Any]]) -> None:
    """Prints the result of every check, or how it failed: one that fails costs the others nothing."""
    results: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            results[name] = check()
        except Exception as error:
            results[name] = {"failed": repr(error)}
    print(json.dumps(results))
