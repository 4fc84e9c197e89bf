"""`python -m jaxvllm.engine.worker SOCKET`: the process of an engine, started by `engine_process`.

It ends when its parent does, however that ends: the parent holds the other end of standard input, and on Linux the
kernel ends it too, even while it is stopped. So that there is no time in which nothing would, this module imports
nothing that takes any.
"""

import ctypes
import logging
import os
import signal
import sys
import threading

# linux/prctl.h
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Works for the client at the socket until that says stop, or is gone."""
    _end_with_parent()
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s engine: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("jaxvllm").setLevel(logging.INFO)
    code, has_others = 1, False
    try:
        from jaxvllm.engine.command_loop import serve

        has_others = serve(sys.argv[1])
        code = 0
    except Exception:
        logging.getLogger("jaxvllm.engine").exception("the engine has failed")
    finally:
        logging.shutdown()
        if has_others:  # at exit it waits until they have left: jax aborts those that process 0 leaves first
            sys.exit(code)
        os._exit(code)  # at once: whoever waits for the end must not wait for what still compiles


def _end_with_parent() -> None:
    # systemd sends SIGTERM to every process of a service. What it means is the parent's to decide.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
