"""The content of a message that a chat template expects: a text, or a list of parts."""

from typing import Literal

from jinja2 import Environment, nodes

# string: a text; openai: a list of parts, as in OpenAI's API, such as {"type": "text", "text": "Hello"}.
type ContentFormat = Literal["string", "openai"]

_MESSAGES = "messages"
_CONTENT = "content"


def find_content_format(environment: Environment, source: str) -> ContentFormat:
    """Returns what a template expects: parts, if it loops over the content of messages, and otherwise a text.

    `source` must be a template that the environment can parse.
    """
    tree = environment.parse(source)
    names = _Names(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(names.is_content(_sequence(loop.iter)) for loop in loops) else "string"


def tests_for_text(environment: Environment, source: str) -> bool:
    """Returns whether a template asks whether a content is a text, so that it can have both."""
    return any(test.name == "string" for test in environment.parse(source).find_all(nodes.Test))


class _Names:
    """The variables of a template that hold its messages, one of them, or the content of one."""

    def __init__(self, tree: nodes.Template) -> None:
        self._messages = {_MESSAGES}
        self._contents: set[str] = set()
        one: set[str] = set()
        # A name may be made of another that stands further down, in a macro, so this goes on until nothing is new.
        while True:
            before = len(self._messages) + len(self._contents) + len(one)
            for assign in tree.find_all(nodes.Assign):
                if isinstance(assign.target, nodes.Name) and isinstance(value := _sequence(assign.node), nodes.Name):
                    if value.name in self._messages:
                        self._messages.add(assign.target.name)
                    if value.name in one:
                        one.add(assign.target.name)
            for loop in tree.find_all(nodes.For):
                if isinstance(loop.target, nodes.Name) and self._holds(_sequence(loop.iter)):
                    one.add(loop.target.name)
            self._one = one
            for assign in tree.find_all(nodes.Assign):
                if isinstance(assign.target, nodes.Name) and self.is_content(_sequence(assign.node)):
                    self._contents.add(assign.target.name)
            if len(self._messages) + len(self._contents) + len(one) == before:
                return

    def _holds(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name in self._messages

    def is_content(self, node: nodes.Node) -> bool:
        """Returns whether an expression is the content of a message."""
        match node:
            case nodes.Name(name=name):
                return name in self._contents
            case nodes.Getattr(node=owner, attr=key):
                pass
            case nodes.Getitem(node=owner, arg=nodes.Const(value=key)):
                pass
            case _:
                return False
        if key != _CONTENT:
            return False
        if isinstance(owner, nodes.Getitem) and self._holds(owner.node):  # messages[0]["content"]
            return True
        return isinstance(owner, nodes.Name) and owner.name in self._one


def _sequence(node: nodes.Node) -> nodes.Node:
    """Returns what an expression takes its items from: `x` of `x[1:]`, of `x | list` and of `x if y else z`."""
    while True:
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node = node.node
        elif isinstance(node, nodes.Filter) and node.node is not None:
            node = node.node
        elif isinstance(node, nodes.CondExpr):
            node = node.expr1
        else:
            return node
