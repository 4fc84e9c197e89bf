"""The patterns of a JSON schema, which are ECMAScript's, as Rust's regular expressions, which llguidance takes."""

import re

# Expressions that look ahead or back are not regular: no automaton follows them. A backslash before the parenthesis
# makes it a character.
_LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")
# ECMAScript's point takes no end of a line. Rust's takes all of them but the line feed.
_POINT = r"[^\n\r\u2028\u2029]"


def looks_around(pattern: object) -> bool:
    """Returns whether a value is an expression that looks ahead or back."""
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def as_rust(pattern: str) -> str:
    """Returns an expression that takes in Rust what `pattern` takes in ECMAScript.

    The two differ in what is within brackets, where Rust knows classes within classes (`[[:alpha:]]`), what two classes
    share (`[a&&b]`) and their difference (`[+--]`), and in the point. What Rust does not know stays as it is.
    """
    parts: list[str] = []
    at = 0
    in_class = False
    after_dash = False
    while at < len(pattern):
        char = pattern[at]
        taken = 1
        if char == "\\":
            taken = 2
            parts.append(pattern[at : at + 2])
        elif not in_class:
            if pattern.startswith(("[]", "[^]"), at):  # of no character, and of every one
                taken = pattern.index("]", at) - at + 1
                parts.append(r"[^\s\S]" if taken == 2 else r"[\s\S]")
            elif char == "[":
                in_class = True
                start = pattern[at : at + 2] if pattern.startswith("[^", at) else "["
                taken = len(start)
                parts.append(start)
                if pattern.startswith("-", at + taken):  # it is a character here
                    taken += 1
                    parts.append(r"\-")
            else:
                parts.append(_POINT if char == "." else char)
        else:
            in_class = char != "]"
            parts.append(f"\\{char}" if char in "[&~" or (char == "-" and after_dash) else char)
        after_dash = in_class and char == "-" and not after_dash
        at += taken
    return "".join(parts)
