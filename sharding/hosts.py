"""The processes that run one model together, usually one on each host: they find each other and exchange messages."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.distributed import global_state  # jax's own record of the processes, which has no public name

# How long processes wait for the others to join. jax's own limit is the same.
JOIN_SECONDS = 300
# This is longer than the slowest host needs to load a large model after the quickest has finished. The processes watch
# each other by then, so one that dies is noticed at once.
LOAD_SECONDS = 3600
# The time for all processes to read the message of the last one.
READ_SECONDS = 30
# A wait inside jax does not react to Ctrl-C, so a long wait consists of many short ones.
SLICE_SECONDS = 1


@dataclass(frozen=True)
class Hosts:
    """This process among the `count` processes of one engine. Process 0 leads, and the others follow it."""

    index: int = 0
    count: int = 1
    address: str = ""  # the host of process 0, as every other process reaches it

    @property
    def leads(self) -> bool:
        return self.index == 0

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"

    def share(self, text: str, seconds: int = JOIN_SECONDS) -> tuple[str, ...]:
        """Returns the `text` of every process, in the order of processes. All must call it equally often.

        Raises TimeoutError when a text is missing after `seconds`. Other failures raise jax's own errors, for
        example when process 0 has ended.
        """
        if self.count == 1:
            return (text,)
        client: Any = global_state.client
        # No key can be written twice, so each call has a number. Every process counts its own calls.
        number = client.key_value_increment(f"jaxvllm/calls/{self.index}", 1)
        client.key_value_set(f"jaxvllm/{number}/text/{self.index}", text)
        texts = self._read(f"jaxvllm/{number}/text", seconds)
        # Process 0 may end because of the texts, and the service ends with it. The others must have read them by then.
        with suppress(jax.errors.JaxRuntimeError, TimeoutError):
            client.key_value_set(f"jaxvllm/{number}/read/{self.index}", "")
            if self.leads:
                self._read(f"jaxvllm/{number}/read", READ_SECONDS)
        return texts

    def least(self, number: int) -> int:
        """Returns the smallest `number` that any process gives."""
        return min(map(int, self.share(str(number), LOAD_SECONDS)))

    def meet(self) -> None:
        """Returns when all processes have called it, however long the slowest one loads or compiles."""
        self.share("", LOAD_SECONDS)

    def _read(self, place: str, seconds: int) -> tuple[str, ...]:
        """Returns the texts of all processes at `place`, after the last one has written."""
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
    """Makes this process one of several, before jax first uses a device. A second call only returns the processes.

    Missing arguments come from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which Ray, Kubernetes or
    a shell script set, and then from the environments that jax detects: TPU pods, Slurm, Open MPI. Raises ValueError
    when something is still missing.
    """
    if global_state.client is None:
        # By default a process that ends takes all others down with it, 100 s later and with a stack trace, and at exit
        # each process waits for the last one. Our leader and followers watch each other, and know when they may end.
        jax.config.update("jax_enable_recoverability", True)
        # jax's notifier would swallow SIGTERM, and this code never asks it whether a signal came.
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
