"""What the documents name exists."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/index.md",
    "docs/notebooks.md",
    "docs/structure.md",
    "docs/glossary.md",
    "docs/kernels.md",
    "docs/ladder.md",
    "docs/scaling.md",
    "docs/simulator.md",
    "docs/startup.md",
    "docs/support.md",
    "docs/models.md",
    "docs/quantization.md",
    "docs/offline.md",
    "docs/sampling.md",
    "docs/structured.md",
    "docs/explain.md",
    "docs/comparison.md",
    "docs/metrics.md",
    "docs/routing.md",
    "docs/kubernetes/README.md",
    "docs/serving.md",
    "docs/playground.md",
    "docs/benchmarking.md",
    "docs/performance.md",
    "docs/log.md",
    "docs/training.md",
    "docs/lora.md",
    "docs/guides/sampling_parameter.md",
    "docs/guides/model_family.md",
    "docs/guides/kernel.md",
    "docs/guides/endpoint.md",
    "docs/decisions/0001-plain-arrays-one-state-one-transfer.md",
    "docs/decisions/0002-the-whole-step-in-one-shard-map.md",
)
PACKAGES = ("jaxvllm", "pallas_kernels", "sharding")

DOTTED = re.compile(r"(?:jaxvllm|pallas_kernels|sharding)(?:\.\w+)+")
METHOD = re.compile(r"([A-Z]\w*[a-z]\w*)\.(\w+)")
# Paths may leave out the folder that a document is about.
FOLDERS = (ROOT, ROOT / "jaxvllm", ROOT / "pallas_kernels" / "ragged_paged_attention")
FILE = re.compile(r"[\w.-]+/[\w./*-]*")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
TARGET = re.compile(r"make ([a-z]+)")


def named(text: str) -> list[str]:
    """What stands between single backticks; fenced blocks are programs, not names."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute (of an attribute) of one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            fields = getattr(value, "__dataclass_fields__", {})
            if part in fields:
                return part == parts[-1]
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@functools.cache
def members() -> dict[str, set[str]]:
    """Every class of the product, and what its body and its bases' name: methods, fields, attributes of self."""
    found: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    names = {part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef)}
                    names |= {part.name for part in ast.walk(node) if isinstance(part, ast.AsyncFunctionDef)}
                    names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                    names |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
                    found.setdefault(node.name, set()).update(names)
                    own = {base.id for base in node.bases if isinstance(base, ast.Name)}
                    bases.setdefault(node.name, set()).update(own)

    def of(name: str) -> set[str]:
        inherited = (of(base) for base in bases.get(name, ()) if base != name)
        return found.get(name, set()).union(*inherited)

    return {name: of(name) for name in found}


def missing(text: str) -> list[str]:
    """The names in a document that nothing answers to."""
    gone = []
    classes = members()
    makefile = (ROOT / "Makefile").read_text()
    for name in named(text):
        bare = re.sub(r"\(.*\)$", "", name)
        if DOTTED.fullmatch(bare):
            exists = resolves(bare)
        elif method := METHOD.fullmatch(bare):
            exists = method[2] in classes.get(method[1], ())
        elif FILE.fullmatch(name):
            exists = any(any(root.glob(name.rstrip("/"))) for root in FOLDERS)
        elif target := TARGET.fullmatch(name):
            exists = re.search(rf"^{target[1]}:", makefile, re.MULTILINE) is not None
        else:
            continue
        gone += [] if exists else [name]
    return gone


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_name_exists(document: str) -> None:
    gone = missing((ROOT / document).read_text())
    assert not gone, f"{document} names what is not there: {gone}"


def test_a_wrong_name_is_seen() -> None:
    wrong = "`jaxvllm.config.NoSuchThing` `jaxvllm/no_such_file.py` `make nothing` `jaxvllm.nowhere`\n"
    wrong += "`Scheduler.no_such_method()` `NoSuchClass.run` `core/no_such_file.py`\n"
    assert len(missing(wrong)) == 7
    right = "`jaxvllm.core.step_plan` `jaxvllm/` `make test` `T` `step(params)` `Scheduler.schedule(now)` `core/`\n"
    fenced = "```\n`jaxvllm.nowhere`\n```\n"
    assert not missing(right + fenced)


def packages() -> set[str]:
    """Every package of the product, as an import names it."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    return {".".join(folder.relative_to(ROOT).parts) for folder in folders}


def without_a_line(text: str) -> list[str]:
    """The packages that begin no line of a list in `text`."""
    lines = set(re.findall(r"^- `([\w.]+)`: ", text, re.MULTILINE))
    return sorted(packages() - lines)


def test_structure_has_a_line_for_every_package() -> None:
    text = (ROOT / "docs/structure.md").read_text()
    assert not without_a_line(text)
    assert len(text.splitlines()) <= 90


def test_a_package_without_a_line_is_seen() -> None:
    text = "".join(f"- `{name}`: one sentence.\n" for name in packages() - {"jaxvllm.text"})
    assert without_a_line(text + "The text of `jaxvllm.text` is no line of its own.\n") == ["jaxvllm.text"]


def broken_links(path: Path) -> list[str]:
    """Links of a document to files that are not there."""
    return [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]


@pytest.mark.parametrize(
    "document", sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
)
def test_links_lead_somewhere(document: str) -> None:
    assert not broken_links(ROOT / document)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "here.md").write_text("[one](here.md) [two](gone.md) [three](https://example.org)")
    assert broken_links(tmp_path / "here.md") == ["gone.md"]
