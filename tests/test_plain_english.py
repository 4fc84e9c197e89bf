"""`tools/plain_english.py` finds what it should, and nothing else."""

import ast
import textwrap
import tomllib

import pytest

from tools.plain_english import RECORD, Words, findings_of, misplaced, third_person_of, verdict

WORDS = Words.of(tomllib.loads(RECORD.read_text(encoding="utf-8"))["words"])
GOOD = '''
"""Pages of the pool. Each of them has an owner."""

class Pool:
    """The pages of all requests.

    - a list may have phrases
    """

    @property
    def size(self):
        """The number of pages, of each group."""

    def take(self, count):
        """Returns `count` pages. It raises ValueError if there are fewer.

        `count` i32[R]
        ids  # i32[R], of each row

        This is the algorithm of A. N. Author et al., 2020.
        """

    async def close(self):
        """Closes it."""

    def without(self): ...
'''


def found(source: str) -> list[tuple[str, str]]:
    return [(each.kind, each.text) for each in findings_of(ast.parse(source), "a.py", WORDS)]


def test_plain_english_is_let_through() -> None:
    assert found(GOOD) == []


@pytest.mark.parametrize(
    ("docstring", "kind"),
    [
        ("The pages of the pool.", "openings"),
        ("Whether it is empty.", "openings"),
        ("`count` pages.", "openings"),
        ("Return the pages.", "openings"),
        ("Returns the pages. Of each group.", "fragments"),
        ("Returns the pages. Those of [W, R] on the host.", "fragments"),
        ("Returns the pages. None: all.", "fragments"),
        ("Returns the pages.\n\n    Whoever waits gets one.", "fragments"),
    ],
)
def test_what_is_hard_to_read_is_found(docstring: str, kind: str) -> None:
    function = f'def f():\n    """{docstring}"""\n'
    assert [each for each, _ in found(function)] == [kind]
    assert [each for each, _ in found("class A:\n" + textwrap.indent(f"async {function}", "    "))] == [kind]


def test_a_property_and_a_class_may_be_nouns_but_no_riddles() -> None:
    assert found('class A:\n    """Which rows yield tokens."""\n') == [("fragments", "Which rows yield tokens.")]
    source = 'class A:\n    @cached_property\n    def pages(self):\n        """Of each group."""\n'
    assert found(source) == [("fragments", "Of each group.")]
    assert [kind for kind, _ in found(source.replace("Of each group", "What it holds"))] == ["fragments"]


def test_behind_is_a_place() -> None:
    def lines(text: str, path: str = "a.md") -> list[str]:
        return [each.place for each in misplaced(text, path, WORDS)]

    assert lines("A server behind a proxy, behind\nits router, and one step behind.") == []
    assert lines("One.\nThe token behind the last.\nBehind it.") == ["a.md:2", "a.md:3"]
    assert lines('behind = 1  # a token behind it\nx = behind\ny = "behind"\n', "a.py") == ["a.py:1", "a.py:3"]


def test_the_third_person() -> None:
    verbs = ["compute", "pass", "carry", "play", "fix", "go", "match"]
    assert [third_person_of(verb) for verb in verbs] == [
        "computes", "passes", "carries", "plays", "fixes", "goes", "matches",
    ]  # fmt: skip


def test_counts_may_fall_and_never_grow() -> None:
    record = {"openings": 2, "fragments": 1}
    assert verdict({"openings": 2, "fragments": 1}, record) == (True, [])
    holds, [told] = verdict({"openings": 1, "fragments": 1}, record)
    assert holds and "lower the record of 2" in told
    holds, [told] = verdict({"openings": 2, "fragments": 3}, record)
    assert not holds and "3 places, and plain_english.toml allows 1" in told
