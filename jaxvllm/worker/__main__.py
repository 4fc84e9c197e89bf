"""`python -m jaxvllm.worker URL`: the process of an engine, started by `engine_process`.

It ends when its parent ends, for whatever reason: the parent holds the other end of its standard input, and on Linux
the kernel ends it too, even while it is stopped. This must work from the first moment, so this module imports nothing
slow at its top.
"""

import logging
import os
import signal
import sys

from jaxvllm.worker.parent import end_with_parent


def main() -> None:
    """Works for the client at the socket until the client says stop or ends."""
    _begin()
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s engine: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("jaxvllm").setLevel(logging.INFO)
    code, has_others = 1, False
    try:
        from jaxvllm.engine.startup import uncollected

        with uncollected():
            from jaxvllm.worker.command_loop import serve
            from jaxvllm.worker.engine_link import Address

        has_others = serve(Address.read(sys.argv[1], os.environ))
        code = 0
    except Exception:
        logging.getLogger("jaxvllm.engine").exception("the engine has failed")
    finally:
        logging.shutdown()
        if has_others:  # a normal exit waits until the others have ended, which jax aborts if process 0 ends first
            sys.exit(code)
        os._exit(code)  # ends at once, so that nobody has to wait for programs that still compile


def _begin() -> None:
    # systemd sends SIGTERM to every process of a service. The parent decides what to do about it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


if __name__ == "__main__":
    main()
