"""Texts, numbers and ranges in words, as reports tell them."""

import math
from collections.abc import Sequence

from rich.cells import cell_len


def spelled(text: str | None) -> str:
    """Returns a text between quotes, with nothing in it that a terminal would obey."""
    return "?" if text is None else repr(text)


def listed(numbers: Sequence[int]) -> str:
    """Returns page numbers, neighbours as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def positions(first: int, number: int, word: str = "position") -> str:
    """Returns a range in words."""
    return f"{word} {first}" if number == 1 else f"{word}s {first}-{first + number - 1}"


def count(number: int, word: str) -> str:
    """Returns a number of things."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def percent(logprob: float) -> str:
    """Returns the probability of a log-probability."""
    share = 100 * math.exp(logprob)
    return f"{share:.1f}%" if share >= 0.05 else "<0.1%"


def milliseconds(seconds: float) -> str:
    """Returns a time with two digits, or all whole ones."""
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def padded(text: str, width: int) -> str:
    """Fills a text up to so many cells, and leaves at least one space after it."""
    return text + " " * max(width - cell_len(text), 1)
