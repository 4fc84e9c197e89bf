"""How a command that talks to a server ends: its exit code, and one line about what went wrong."""

import sys
from collections.abc import Callable

from jaxvllm.client.errors import ServerError


def exit_code(command: str, run: Callable[[], int]) -> int:
    """What `run` returns; with a line on standard error 1 when the server fails, 2 when something given is wrong.

    130 after Ctrl-C.
    """
    try:
        return run()
    except (ServerError, ValueError, OSError) as error:
        print(f"jaxvllm {command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ServerError) else 2
    except KeyboardInterrupt:
        return 130
