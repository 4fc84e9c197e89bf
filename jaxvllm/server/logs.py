"""Sets up the logs of the server's processes."""

import logging


def set_up_logs() -> None:
    """Sets up logs as short lines on standard error, in the same form as those of the engine's process."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s server: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("jaxvllm").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are about clients' mistakes
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has disconnected
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
