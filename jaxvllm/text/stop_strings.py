"""Finds stop strings in a growing text, and says how much of the text's end may be the beginning of one."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefixNode:
    """A state of the automaton: a prefix of some stop string, with `depth` characters."""

    depth: int
    children: dict[str, "PrefixNode"] = field(default_factory=dict, repr=False)
    fallback: "PrefixNode | None" = field(default=None, repr=False)  # the longest proper suffix that is also a prefix
    match: str | None = None  # the longest stop string that ends here


class StopStrings:
    """An Aho-Corasick automaton over the stop strings: one step for each character, however many strings there are.

    It never changes, so that all completions of a request can share it. The state of a text is a `PrefixNode`, and at
    first `root`. A. Aho, M. Corasick: Efficient string matching (1975).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.root = PrefixNode(0)
        for stop in stops:
            node = self.root
            for char in stop:
                node = node.children.setdefault(char, PrefixNode(node.depth + 1))
            node.match = stop
        level = [self.root]
        while level:  # breadth first: a fallback is shorter than its node, so it is complete before it is needed
            for node in level:
                for char, child in node.children.items():
                    child.fallback = self.root if node is self.root else self._next(node.fallback, char)
                    child.match = child.match or child.fallback.match
            level = [child for node in level for child in node.children.values()]

    def advance(self, state: PrefixNode, text: str, ignore: bool = False) -> tuple[PrefixNode, int, str | None]:
        """Reads `text` from `state` on, up to the end of the first complete stop string.

        Returns the new state, the number of characters read, and the stop string: the longest that ends there, or
        None. The state's depth is the number of trailing characters that may be the beginning of a stop string. With
        `ignore`, complete stop strings do not count.
        """
        for i, char in enumerate(text):
            state = self._next(state, char)
            if state.match is not None and not ignore:
                return state, i + 1, state.match
        return state, len(text), None

    def _next(self, state: PrefixNode | None, char: str) -> PrefixNode:
        while state is not None:
            if (child := state.children.get(char)) is not None:
                return child
            state = state.fallback
        return self.root
