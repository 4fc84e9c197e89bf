"""Commands of the command line, in the test's own process."""

from collections.abc import Callable, Sequence


def exit_code_of(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Returns the code with which the command ends, also where its parser ends it."""
    try:
        return main(argv)
    except SystemExit as exit:
        assert isinstance(exit.code, int)
        return exit.code
