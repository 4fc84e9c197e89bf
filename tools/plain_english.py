"""Counts what is hard to read in docstrings and texts: `python -m tools.plain_english`, which CI runs.

It exits with 1 where there is more of something than `plain_english.toml` records, so the counts can only fall. The
rules are in CONTRIBUTING.md:

- `openings`: the docstring of a function or method begins with a verb in the third person. A property may begin with a
  noun, because it reads like a value.
- `fragments`: every sentence of a docstring has a verb, and none begins with a word such as "Of", "Those" or "Which".
  Only the first sentence of a module, a class or a property may name what it describes: by a noun ("The pages of a
  request."), and not by a clause ("What it holds.").
- `behind`: the word means a place ("behind a proxy"), and not "after".
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
RECORD: Final = Path(__file__).with_suffix(".toml")
PACKAGES: Final = ("jaxvllm", "pallas_kernels", "sharding", "tools", "benchmarks")
# Where the word "behind" is looked for, too.
TEXTS: Final = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "docs", "tests", "colab", *PACKAGES)
SUFFIXES: Final = frozenset({"", ".css", ".html", ".ipynb", ".js", ".md", ".py", ".toml", ".yml"})
# Records of runs, the demo model with the words of its stories, and this rule itself.
SKIPPED: Final = ("benchmarks/results", "jaxvllm/assets", "tools/demo_words", "node_modules", "plain_english")


FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
TEXT_TOKENS: Final = (tokenize.COMMENT, tokenize.STRING, tokenize.FSTRING_MIDDLE)
# Shapes of arguments, and references to publications.
NO_SENTENCE: Final = re.compile(r"^[a-z]\w*(?:, \w+)*:? .*\w\[|et al|arXiv|\b\d{4}\)?\.$")


@dataclass(frozen=True, slots=True)
class Finding:
    """A place where a rule is broken."""

    kind: str
    place: str  # path:line
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True, slots=True)
class Words:
    """The words that the rules know."""

    third_person: frozenset[str]  # with which the docstring of a function begins
    finite: frozenset[str]  # any of which makes a sentence
    fragment_starts: frozenset[str]
    clause_starts: frozenset[str]
    places: re.Pattern[str]  # "behind" as a place

    @classmethod
    def of(cls, rules: dict[str, list[str]]) -> "Words":
        """Derives the forms of the verbs that `plain_english.toml` lists."""
        third_person = {third_person_of(verb) for verb in rules["verbs"]}
        return cls(
            frozenset(third_person | {"is", "has", "does"}),
            frozenset(third_person | set(rules["verbs"]) | set(rules["finite"])),
            frozenset(rules["fragment_starts"]),
            frozenset(rules["clause_starts"]),
            re.compile("|".join(rules["behind"]).replace(" ", r"\s+"), re.IGNORECASE),
        )


def third_person_of(verb: str) -> str:
    """Returns the form after "it": computes, passes, carries."""
    if re.search(r"(s|x|z|ch|sh|o)$", verb):
        return f"{verb}es"
    return f"{verb[:-1]}ies" if re.search(r"[^aeiou]y$", verb) else f"{verb}s"


def sentences(docstring: str) -> Iterator[str]:
    """Yields the sentences of a docstring without its lists and indented blocks."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))", docstring):
        if re.match(r"    |\s*(?:- |\d+\. )", paragraph):
            continue
        text = re.sub(r"``?[^`]+``?", "code", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[^A-Z\s][.!?])\s+(?=[A-Z])|(?<=\b[A-Z]{2}\.)\s+(?=[A-Z])", text):
            if sentence:
                yield sentence


def findings_of(tree: ast.Module, path: str, words: Words) -> Iterator[Finding]:
    """Yields what is wrong with the docstrings of a module."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        if docstring := ast.get_docstring(node):
            place = f"{path}:{getattr(node, 'lineno', 1)}"
            first, *others = list(sentences(docstring)) or [""]
            if isinstance(node, FUNCTIONS) and not is_property(node):
                if not set(words_in(first)[:1]) & words.third_person:
                    yield Finding("openings", place, first)
            elif is_headless(first, words) or set(words_in(first)[:1]) & words.clause_starts:
                yield Finding("fragments", place, first)
            for sentence in others:
                if NO_SENTENCE.search(sentence):
                    continue
                if is_headless(sentence, words) or not words.finite & set(words_in(sentence)):
                    yield Finding("fragments", place, sentence)


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a method is read like a field."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_headless(sentence: str, words: Words) -> bool:
    """Returns whether a sentence begins like a clause that has lost its noun, such as "Of each group."."""
    return bool(set(words_in(sentence)[:1]) & words.fragment_starts)


def words_in(text: str) -> list[str]:
    """Returns the words of a text in lower case."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def prose_of(text: str, suffix: str) -> str:
    """Returns a text by lines without code in backticks, and of Python only the comments and the strings."""
    if suffix == ".py":
        lines = [""] * (text.count("\n") + 2)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in TEXT_TOKENS:
                for number, line in enumerate(token.string.split("\n"), start=token.start[0]):
                    lines[number - 1] += f" {line}"
        text = "\n".join(lines)
    return re.sub(r"`[^`\n]+`", "code", text)


def misplaced(text: str, path: str, words: Words) -> Iterator[Finding]:
    """Yields the lines in which "behind" does not mean a place."""

    def lines_of(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    prose = words.places.sub(lines_of, prose_of(text, Path(path).suffix))
    for number, line in enumerate(prose.splitlines(), start=1):
        if re.search(r"\bbehind\b", line, re.IGNORECASE):
            yield Finding("behind", f"{path}:{number}", line.strip()[:160])


def files(names: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Yields the files to read, with their paths in the repository."""
    for name in names:
        for path in sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]:
            relative = path.relative_to(ROOT).as_posix()
            if path.is_file() and path.suffix in SUFFIXES and not any(part in relative for part in SKIPPED):
                yield path, relative


def all_findings(words: Words) -> list[Finding]:
    """Returns what is wrong in the whole repository."""
    found: list[Finding] = []
    for path, relative in files(PACKAGES):
        if path.suffix == ".py":
            found += findings_of(ast.parse(path.read_text(encoding="utf-8")), relative, words)
    for path, relative in files(TEXTS):
        found += misplaced(path.read_text(encoding="utf-8"), relative, words)
    return found


def verdict(counts: dict[str, int], record: dict[str, int]) -> tuple[bool, list[str]]:
    """Returns whether no count exceeds its record, and what to tell about those that differ from it."""
    told = []
    for kind, allowed in record.items():
        if counts[kind] > allowed:
            told.append(f"{kind}: {counts[kind]} places, and {RECORD.name} allows {allowed}: rewrite the new ones")
        elif counts[kind] < allowed:
            told.append(f"{kind}: {counts[kind]} places are left: lower the record of {allowed} in {RECORD.name}")
    return all(counts[kind] <= allowed for kind, allowed in record.items()), told


def main() -> int:
    """Prints the places of each kind that exceeds its record, or all of them with `--list`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="print every place, not only of a kind that has grown")
    arguments = parser.parse_args()
    rules = tomllib.loads(RECORD.read_text(encoding="utf-8"))
    record: dict[str, int] = rules["record"]
    found = all_findings(Words.of(rules["words"]))
    counts = {kind: sum(each.kind == kind for each in found) for kind in record}
    holds, told = verdict(counts, record)
    for each in found:
        if arguments.list or counts[each.kind] > record[each.kind]:
            print(f"{each.kind}: {each}")
    print("\n".join(told) or f"plain English is as recorded: {counts}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
