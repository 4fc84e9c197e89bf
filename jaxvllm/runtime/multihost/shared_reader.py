"""`SharedReader`: all processes of an engine read the same weights, or none of them takes any."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxvllm.models.params import Params
from sharding.hosts import LOAD_SECONDS, Hosts


@dataclass(frozen=True)
class SharedReader:
    """Reads the weights of a directory for the devices of this process. All processes call it at the same time."""

    hosts: Hosts
    read: Callable[[Path], Params]

    def __call__(self, directory: Path) -> Params:
        """Raises ValueError in all processes where one of them cannot read them, with its reason."""
        params, trouble = None, ""
        try:
            params = self.read(directory)
        except Exception as error:  # whatever it is, the weights before are still there
            trouble = f"{self.hosts}: {' '.join(str(error).split()) or type(error).__name__}"
        for told in self.hosts.share(trouble, LOAD_SECONDS):
            if told:
                raise ValueError(told)
        assert params is not None, "it is read where there was no trouble"
        return params
