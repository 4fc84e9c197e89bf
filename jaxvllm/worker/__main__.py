"""`python -m jaxvllm.worker SOCKET`: the process of an engine, started by `engine_process`.

It ends when its parent ends, for whatever reason: the parent holds the other end of its standard input, and on Linux
the kernel ends it too, even while it is stopped. This must work from the first moment, so this module imports nothing
slow at its top.
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
    """Works for the client at the socket until the client says stop or ends."""
    _end_with_parent()
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s engine: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("jaxvllm").setLevel(logging.INFO)
    code, has_others = 1, False
    try:
        from jaxvllm.worker.command_loop import serve

        has_others = serve(sys.argv[1])
        code = 0
    except Exception:
        logging.getLogger("jaxvllm.engine").exception("the engine has failed")
    finally:
        logging.shutdown()
        if has_others:  # a normal exit waits until the others have ended, which jax aborts if process 0 ends first
            sys.exit(code)
        os._exit(code)  # ends at once, so that nobody has to wait for programs that still compile


def _end_with_parent() -> None:
    # systemd sends SIGTERM to every process of a service. The parent decides what to do about it.
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
