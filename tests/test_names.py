"""A name of a class stands for one idea."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxvllm", "pallas_kernels", "sharding")
# The same idea in several places: an exchange of each protocol, the program of each readout, and OpenAI's numbers of
# tokens as the server writes and as a client reads them.
SHARED = {"Exchange", "Program", "PromptTokensDetails", "Usage"}


def test_no_two_classes_share_a_name() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    counts = Counter(node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in counts.items() if count > 1} == SHARED
