"""`EngineAdapters`: the adapters that requests of an engine may name, and that its requests have."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.lora import LoraAdapter, LoRARequest, salt_without_adapter
from jaxvllm.core.request import GenerationRequest
from jaxvllm.engine.lora_store import LoraStore
from jaxvllm.engine.replica import Replica
from jaxvllm.models.lora import LAYERS, OUTSIDE

if TYPE_CHECKING:
    from jaxvllm.engine.adapter_reader import AdapterReader


class EngineAdapters:
    """Finds the adapters of requests: as they were read, or as they were updated since."""

    def __init__(self, config: EngineConfig, reader: "AdapterReader | None", replicas: Sequence[Replica]):
        """Reads adapters with `reader`. An engine that has none has no room for adapters."""
        self._reader = reader
        self._store = None if reader is None else LoraStore(reader.read, config.max_cpu_loras or config.max_loras)
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
        assert self._reader is not None
        if not isinstance(tensors, Mapping):
            raise ParameterError(
                "tensors must be arrays by PEFT's names, or a tree like llm.lora_weights(lora_request), not "
                f"{type(tensors).__name__}",
                "tensors",
            )
        if tensors.keys() & {LAYERS, OUTSIDE}:
            adapter = self._reader.of_tree(tensors, request.lora_name)
        else:
            adapter = _adapter_of(request, tensors, self._reader.read)
        self._updated[request.lora_int_id] = request, adapter

    def tree(self, request: LoRARequest) -> dict[str, Any]:
        """Returns the arrays of an adapter. For the names and errors see `LLM.lora_weights`."""
        self.load(request)
        assert self._store is not None
        copy: dict[str, Any] = jax.tree.map(np.array, self._find(request, self._store).arrays)
        return copy

    def _find(self, request: LoRARequest, store: LoraStore) -> LoraAdapter:
        known, adapter = self._updated.get(request.lora_int_id, (None, None))
        return adapter if adapter is not None and known == request else store.get(request)

    def of(self, request: GenerationRequest) -> LoraAdapter | None:
        """Returns the adapter of a request that was checked, if it has one. Raises ValueError for a wrong one."""
        if request.lora_request is None or self._store is None:
            return None
        return self._find(request.lora_request, self._store)

    def like(self, request: GenerationRequest, digest: bytes | None) -> LoraAdapter | None:
        """Returns the adapter of a request that comes from another engine, where it has this digest.

        It may be one that this engine has under another number. If there is none, it is read where the request says.
        Raises ValueError where that is another one.
        """
        if digest is not None and request.lora_request is not None and self._store is not None:
            updated = (adapter for _, adapter in self._updated.values() if adapter.digest == digest)
            if (adapter := next(updated, self._store.with_digest(digest))) is not None:
                return replace(adapter, name=request.lora_request.lora_name)
        adapter = self.of(request)
        if digest != (None if adapter is None else adapter.digest):
            name = None if request.lora_request is None else request.lora_request.lora_name
            raise ParameterError(
                f"the adapter {name!r} of this engine is not the one with which the request was exported: give both "
                "engines the same files, or the same update_lora",
                "lora_request",
            )
        return adapter

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


def _adapter_of(
    request: LoRARequest, tensors: Mapping[str, Any], read: Callable[[Path, str], LoraAdapter]
) -> LoraAdapter:
    """Returns the adapter of these tensors and of the config in the directory of `request`.

    They go through a file, so that arrays are checked as files are, by the same code.
    """
    from safetensors.numpy import save_file

    from jaxvllm.models.peft import PEFT_CONFIG, PEFT_WEIGHTS

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
