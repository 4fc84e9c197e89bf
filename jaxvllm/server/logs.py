"""Sets up the logs of the processes that answer HTTP."""

import logging


def set_up_logs(name: str = "server") -> None:
    """Sets up logs as short lines of the process `name` on standard error, in the form of the engine's process."""
    logging.basicConfig(
        level=logging.WARNING, format=f"%(levelname)s %(asctime)s {name}: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("jaxvllm").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are about clients' mistakes
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has disconnected
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
