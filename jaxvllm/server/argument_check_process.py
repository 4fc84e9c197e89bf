"""`python -m jaxvllm.server.argument_check_process`: tells which rules of their schemas the arguments of calls break.

Schemas come from clients, and some take for ever to validate: 60 schemas, each of which refers twice to the next, have
2^60 references. So each check has a process of its own, whose time and memory are limited.

Its input is a JSON list of {"name": ..., "arguments": ..., "schema": ...}, and its output a JSON list of texts.
"""

import json
import resource
import sys
from typing import Any

import jsonschema_rs

from jaxvllm.text.json_pointer import escaped

CPU_SECONDS = 1
MEMORY_BYTES = 2**30  # of addresses, a tenth of which is used
BACKTRACKING_STEPS = 100_000  # of one expression that looks ahead or back
MOST_RULES = 20  # that one call is told to break


def broken_rules(name: str, arguments: str, schema: dict[str, Any]) -> list[str]:
    """Returns a text for each rule of the schema that the arguments of a call of `name` break."""
    try:
        validator = jsonschema_rs.validator_for(
            schema,
            offline=True,
            validate_formats=True,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKING_STEPS),
        )
    except ValueError as error:
        reason = " ".join(str(error).partition("\n")[0].split())
        return [f"the call of {name} was not checked against its schema, which is not valid: {reason:.200}"]
    found: dict[str, None] = {}
    for broken in validator.iter_errors(json.loads(arguments)):
        *place, keyword = map(str, broken.schema_path)
        pointer = "/".join(["#", *map(escaped, place)])
        found[f"the call of {name} breaks the keyword {json.dumps(keyword)} at {pointer}"] = None
        if len(found) == MOST_RULES:
            break
    return list(found)


def main() -> None:
    """Reads the calls and writes what is wrong with them."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    calls = json.load(sys.stdin.buffer)
    json.dump([text for call in calls for text in broken_rules(**call)], sys.stdout)


if __name__ == "__main__":
    main()
