"""The processes that run one model together, usually one a host: how they find and what they tell each other."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.distributed import global_state  # where jax keeps who is here; it has no public name

# How long processes wait for the others to come; jax's own patience when they join is the same.
JOIN_SECONDS = 300
# Longer than the slowest host needs to load a large model that the quickest has in memory. By then they watch each
# other: a process that dies is noticed at once.
LOAD_SECONDS = 3600
# For all to read what the last of them has said.
READ_SECONDS = 30
# A wait inside jax is deaf to Ctrl-C, so a long one is many of these.
SLICE_SECONDS = 1


@dataclass(frozen=True)
class Hosts:
    """This process among the `count` of one engine. Process 0 leads, the others follow it."""

    index: int = 0
    count: int = 1
    address: str = ""  # the host of process 0, as every other process reaches it

    @property
    def leads(self) -> bool:
        return self.index == 0

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"

    def share(self, text: str, seconds: int = JOIN_SECONDS) -> tuple[str, ...]:
        """Every process's `text`, in their order. All call it, equally often; TimeoutError after `seconds` without.

        What else goes wrong on the way, process 0 having gone among it, is jax's own error.
        """
        if self.count == 1:
            return (text,)
        client: Any = global_state.client
        # Nothing can be written twice, so each call has a number; every process counts its own calls, there.
        number = client.key_value_increment(f"jaxvllm/calls/{self.index}", 1)
        client.key_value_set(f"jaxvllm/{number}/text/{self.index}", text)
        texts = self._read(f"jaxvllm/{number}/text", seconds)
        # What process 0 reads may make it end, and the service with it: not before the others have read it too.
        with suppress(jax.errors.JaxRuntimeError, TimeoutError):
            client.key_value_set(f"jaxvllm/{number}/read/{self.index}", "")
            if self.leads:
                self._read(f"jaxvllm/{number}/read", READ_SECONDS)
        return texts

    def least(self, number: int) -> int:
        """The least that any process gives."""
        return min(map(int, self.share(str(number), LOAD_SECONDS)))

    def meet(self) -> None:
        """Returns when all have come here, however long the slowest loads or compiles."""
        self.share("", LOAD_SECONDS)

    def _read(self, place: str, seconds: int) -> tuple[str, ...]:
        """What every process has written at `place`, when the last of them has."""
        deadline = time.monotonic() + seconds
        texts: list[str] = []
        while len(texts) < self.count:
            try:
                key = f"{place}/{len(texts)}"
                texts.append(global_state.client.blocking_key_value_get(key, SLICE_SECONDS * 1000))  # type: ignore[union-attr]
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self} waited {seconds} s for process {len(texts)}: see its log") from None
        return tuple(texts)


ALONE = Hosts()


def join(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> Hosts:
    """Makes this process one of several, before jax's first use of a device; a second call only says who is here.

    What is not given comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which Ray, Kubernetes or
    a shell script set, and what those leave open from what jax detects: TPU pods, Slurm, Open MPI. ValueError when
    something is missing still.
    """
    if global_state.client is None:
        # By default a process that ends takes all others down with it, 100 s later and with a stack trace, and at exit
        # each waits for the last. Our leader and followers watch each other, and know who may leave when.
        jax.config.update("jax_enable_recoverability", True)
        # It would swallow SIGTERM, and nobody here asks it whether one came.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            jax.distributed.initialize(
                coordinator,
                _from_environment("JAX_NUM_PROCESSES") if num_processes is None else num_processes,
                _from_environment("JAX_PROCESS_ID") if process_id is None else process_id,
            )
        except ValueError as error:
            raise ValueError(
                f"this process could not join others ({error}): give --coordinator, --num-processes and --process-id, "
                "or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
            ) from error
        except RuntimeError as error:
            raise ValueError(f"this process could not join others: {' '.join(str(error).split())}") from error
    host = (global_state.coordinator_address or "").rpartition(":")[0].strip("[]")
    return Hosts(global_state.process_id, global_state.num_processes, host)


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise ValueError(f"{name} must be a whole number, not {text!r}")
    return None if text is None else int(text)
