"""The exit code of a command that uses a server, and the line that explains an error."""

import sys
from collections.abc import Callable

from jaxvllm.client.errors import ServerError


def exit_code(command: str, run: Callable[[], int]) -> int:
    """Returns `run()`. After an error it prints a line on standard error and returns 1 if the server failed, else 2.

    After Ctrl-C it returns 130.
    """
    try:
        return run()
    except BrokenPipeError:
        raise
    except (ServerError, ValueError, NotImplementedError, OSError) as error:
        print(f"jaxvllm {command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ServerError) else 2
    except KeyboardInterrupt:
        return 130
