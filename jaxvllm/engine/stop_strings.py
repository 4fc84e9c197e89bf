"""Finds stop strings in a growing text, and says how much of its end could still become one."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Node:
    """A prefix of some stop string: `depth` characters."""

    depth: int
    children: dict[str, "Node"] = field(default_factory=dict, repr=False)
    fallback: "Node | None" = field(default=None, repr=False)  # the longest proper suffix that is a prefix too
    match: str | None = None  # the longest stop string that ends here


class StopStrings:
    """An Aho-Corasick automaton over the stop strings: one step a character, however many strings there are.

    Immutable once built, so that all completions of a request share it. A text's state is a `Node`, at first
    `root`.
    A. Aho, M. Corasick: Efficient string matching (1975).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.root = Node(0)
        for stop in stops:
            node = self.root
            for char in stop:
                node = node.children.setdefault(char, Node(node.depth + 1))
            node.match = stop
        level = [self.root]
        while level:  # breadth first: a fallback is shorter, so it is complete before it is needed
            for node in level:
                for char, child in node.children.items():
                    child.fallback = self.root if node is self.root else self._next(node.fallback, char)
                    child.match = child.match or child.fallback.match
            level = [child for node in level for child in node.children.values()]

    def advance(self, state: Node, text: str, ignore: bool = False) -> tuple[Node, int, str | None]:
        """Reads `text` from `state` on, up to the first stop string completed, the longest that ends there.

        Returns the new state, the characters read, and the stop string. The state's depth is the number of
        trailing characters that may be the beginning of one. With `ignore`, completed ones do not count.
        """
        for i, char in enumerate(text):
            state = self._next(state, char)
            if state.match is not None and not ignore:
                return state, i + 1, state.match
        return state, len(text), None

    def _next(self, state: Node | None, char: str) -> Node:
        while state is not None:
            if (child := state.children.get(char)) is not None:
                return child
            state = state.fallback
        return self.root
