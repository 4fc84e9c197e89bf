"""`EngineAdapters`: the adapters that requests of an engine may name, and that its requests have."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.lora import LoraAdapter, LoRARequest, salt_without_adapter
from jaxvllm.core.request import GenerationRequest
from jaxvllm.engine.lora_store import LoraStore
from jaxvllm.engine.replica import Replica
from jaxvllm.models.peft import PEFT_CONFIG, PEFT_WEIGHTS

# Reads the adapter of a directory, with its name. Raises ValueError and NotImplementedError for a wrong one.
type ReadAdapter = Callable[[Path, str], LoraAdapter]


class EngineAdapters:
    """Finds the adapters of requests: as they were read, or as they were updated since."""

    def __init__(self, config: EngineConfig, read: ReadAdapter | None, replicas: Sequence[Replica]):
        """Takes what reads adapters, or None where there is no room for any."""
        self._read = read
        self._store = None if read is None else LoraStore(read, config.max_cpu_loras or config.max_loras)
        self._replicas = replicas
        self._max_loras = config.max_loras
        # By number. No file has their content, so they stay until somebody unloads them.
        self._updated: dict[int, tuple[LoRARequest, LoraAdapter]] = {}

    def load(self, request: LoRARequest) -> None:
        """Reads an adapter into host memory, unless it is there. Raises ValueError for a wrong one."""
        if self._store is None:
            raise ValueError("adapters need an engine that has room for them: set enable_lora")
        self._find(request, self._store)

    def unload(self, number: int) -> None:
        """Forgets an adapter in host memory, if it is there. Requests that have it go on."""
        if self._store is not None:
            self._store.forget(number)
            self._updated.pop(number, None)

    def update(self, request: LoRARequest, tensors: Mapping[str, Any]) -> None:
        """Replaces the content of an adapter. For arguments and errors see `LLM.update_lora`."""
        self.load(request)  # so that the number is its own, and its config is there
        assert self._read is not None
        self._updated[request.lora_int_id] = request, _adapter_of(request, tensors, self._read)

    def _find(self, request: LoRARequest, store: LoraStore) -> LoraAdapter:
        known, adapter = self._updated.get(request.lora_int_id, (None, None))
        return adapter if adapter is not None and known == request else store.get(request)

    def of(self, request: GenerationRequest) -> LoraAdapter | None:
        """Returns the adapter of a request that was checked, if it has one. Raises ValueError for a wrong one."""
        if request.lora_request is None or self._store is None:
            return None
        return self._find(request.lora_request, self._store)

    def salted(self, request: GenerationRequest, adapter: LoraAdapter | None) -> GenerationRequest:
        """Returns the request with a salt that keeps the prefixes of each adapter apart from all others."""
        given = request.prompt.cache_salt
        salt = salt_without_adapter(given) if adapter is None else adapter.salt(given)
        return replace(request, prompt=replace(request.prompt, cache_salt=salt))

    def stats(self) -> dict[str, Any]:
        """Returns what `EngineStats` tells of adapters."""
        if self._store is None:
            return {}
        schedulers = [replica.scheduler for replica in self._replicas]
        return {
            "max_loras": self._max_loras,
            "running_adapters": _names(one for scheduler in schedulers for one in scheduler.lora_slots.held.values()),
            "waiting_adapters": _names(one.adapter for scheduler in schedulers for one in scheduler.queue),
        }


def _adapter_of(request: LoRARequest, tensors: Mapping[str, Any], read: ReadAdapter) -> LoraAdapter:
    """Returns the adapter of these tensors and of the config in the directory of `request`.

    They go through a file, so that arrays are checked as files are, by the same code.
    """
    given = f"the given tensors of the adapter {request.lora_name!r}"
    wrong = [name for name, array in tensors.items() if not hasattr(array, "dtype") or not isinstance(name, str)]
    if wrong:
        raise ParameterError(f"{given} must be arrays by their names in a file of PEFT, not {wrong[0]!r}", "tensors")
    with TemporaryDirectory(prefix="jaxvllm-adapter-") as directory:

        def told(error: Exception) -> str:
            return str(error).replace(f"{directory}/{PEFT_WEIGHTS}", given).replace(directory, given)

        try:
            shutil.copy(Path(request.lora_path) / PEFT_CONFIG, directory)
            arrays = {name: np.ascontiguousarray(np.asarray(array)) for name, array in tensors.items()}
            save_file(arrays, Path(directory) / PEFT_WEIGHTS)
            return read(Path(directory), request.lora_name)
        except NotImplementedError as error:
            raise NotImplementedError(told(error)) from error
        except (ValueError, OSError) as error:
            raise ParameterError(told(error), "tensors") from error


def _names(adapters: Iterable[LoraAdapter | None]) -> tuple[str, ...]:
    """Returns the names of adapters, each once."""
    return tuple(sorted({adapter.name for adapter in adapters if adapter is not None}))
