"""Forces calls of all functions of the Berkeley Function-Calling Leaderboard, and checks their arguments.

    pip download --no-deps bfcl-eval
    python -m tools.bfcl bfcl_eval-*.whl

Each function becomes a tool as BFCL itself makes one for OpenAI's API. For each the form of a call that must be this
one is compiled, and for each question with several functions the form of calls of any of them. What a model would write
that likes all tokens equally is drawn, and jsonschema-rs validates the arguments against the tool's own schema.
docs/compatibility.md tells what was found.
"""

import argparse
import copy
import json
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs

from jaxvllm.core.errors import ParameterError
from jaxvllm.text.tool_use import Tool, ToolUse
from tests.grammar.demo import compiler
from tests.grammar.random_walk import random_walk

DATA = "bfcl_eval/data/"
WITHOUT_QUESTIONS = ("BFCL_v4_format_sensitivity.json",)  # it names questions of other files
# The types that BFCL names, and those of JSON schemas.
TYPES = (
    dict.fromkeys(("integer", "byte", "short", "long", "Bigint"), "integer")
    | dict.fromkeys(("number", "float", "double"), "number")
    | dict.fromkeys(("string", "any", "char", "Any", "String"), "string")
    | dict.fromkeys(("boolean", "bool"), "boolean")
    | dict.fromkeys(("array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array")
    | dict.fromkeys(("dict", "object", "HashMap", "Hashtable"), "object")
)


def questions(wheel: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the name and the functions of each question, and of each class of functions."""
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            folder, _, name = path.removeprefix(DATA).rpartition("/")
            if not path.startswith(DATA) or not name.endswith(".json") or name in WITHOUT_QUESTIONS:
                continue
            if folder in ("", "multi_turn_func_doc"):
                lines = [json.loads(line) for line in archive.read(path).decode().split("\n") if line.strip()]
                if folder:
                    yield name, lines
                else:
                    yield from ((line["id"], line["function"]) for line in lines if line.get("function"))


def tool_of(function: dict[str, Any]) -> Tool:
    """Returns a function as the tool that BFCL makes of it."""
    parameters = copy.deepcopy(function["parameters"])
    _cast(parameters["properties"])
    return Tool(function["name"].replace(".", "_"), parameters | {"type": "object"})


def _cast(properties: dict[str, Any]) -> None:
    """Replaces the types of BFCL as deep as BFCL's own code does."""
    for schema in properties.values():
        if schema.get("type") == "float":
            schema["format"] = "float"
        schema["type"] = TYPES.get(schema.get("type"), "string")
        if schema["type"] not in ("array", "object"):
            continue
        if "properties" in schema:
            _cast(schema["properties"])
        elif "items" in schema:
            items = schema["items"]
            items["type"] = TYPES[items["type"]]
            if items["type"] == "array" and "items" in items:
                items["items"]["type"] = TYPES[items["items"]["type"]]
            elif items["type"] == "object" and "properties" in items:
                _cast(items["properties"])


def check(tools: Sequence[Tool], name: str | None, seeds: Sequence[int]) -> tuple[str, str]:
    """Returns how the calls of a form ended, and what is wrong.

    The tool with this name must be called, or any if it is None.
    """
    form = ToolUse(tuple(tools), "required" if name is None else "named", name).structured_outputs()
    assert form is not None
    try:
        grammar = compiler().compile(form).result()
    except ParameterError as error:
        return "refused", str(error)
    for seed in seeds:
        text = random_walk(grammar, seed)
        if text is None:
            return "without an end", "2000 tokens"
        calls = json.loads(text) if name is None else [{"name": name, "parameters": json.loads(text)}]
        for call in calls:
            # Of two functions of one name either is meant.
            meant = [tool.parameters or {} for tool in tools if tool.name == call["name"]]
            errors = [list(_validator(one).iter_errors(call["parameters"])) for one in meant]
            if all(errors):
                return "invalid", f"{errors[0][0].instance_path}: {errors[0][0].message}"
    return "valid, with a warning" if grammar.warnings else "valid", "; ".join(grammar.warnings)


def _validator(schema: Mapping[str, Any]) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(dict(schema), validate_formats=True)


def main() -> None:
    """Prints how many calls are valid, and each function that has others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--walks", type=int, default=2, help="texts for each form")
    arguments = parser.parse_args()
    counts: dict[str, Counter[str]] = {"named": Counter(), "required": Counter()}
    warnings: Counter[str] = Counter()
    seen: set[str] = set()
    for question, functions in questions(arguments.wheel):
        try:
            tools = [tool_of(function) for function in functions]
        except (KeyError, TypeError, AttributeError) as error:
            print(f"{question}: BFCL's own code makes no tool of it: {error!r}")
            continue
        for choice, name, offered in [
            *(("named", tool.name, [tool]) for tool in tools),
            *([("required", None, tools)] if len(tools) > 1 else []),
        ]:
            key = json.dumps([name, [(tool.name, tool.parameters) for tool in offered]])
            if key in seen:
                continue
            seen.add(key)
            outcome, detail = check(offered, name, range(arguments.walks))
            counts[choice][outcome] += 1
            if outcome == "valid, with a warning":
                warnings.update({warning.partition(" at #")[0] for warning in detail.split("; ")})
            elif outcome != "valid":
                print(f"{question}, {name or 'any'}: {outcome}: {detail:.300}")
    for choice, ended in counts.items():
        print(choice, sum(ended.values()), dict(ended))
    print("warnings", dict(warnings))


if __name__ == "__main__":
    main()
