"""`escaped`: a name as one step of a JSON pointer."""


def escaped(name: str) -> str:
    """Returns `name` as a step of a JSON pointer (RFC 6901, section 3)."""
    return name.replace("~", "~0").replace("/", "~1")
