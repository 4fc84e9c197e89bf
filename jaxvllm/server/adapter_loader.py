"""`AdapterLoader`: loads and unloads the adapters of a server, and finds those that requests name first."""

import asyncio
import logging
import time
from dataclasses import dataclass
from weakref import WeakValueDictionary

from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.lora import LoRARequest
from jaxvllm.engine.commands import LoadAdapter, UnloadAdapter
from jaxvllm.server.adapter_names import AdapterFiles, AdapterNames
from jaxvllm.worker.engine_client import EngineClient

logger = logging.getLogger(__name__)

# An adapter that could not be read is read again after this time although its files are the same: the reason may have
# been elsewhere, such as on the host of an engine. All engines stop for it between two steps.
RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class FailedAdapter:
    """An adapter that a request has named first, and that could not be read."""

    reason: str
    files: AdapterFiles
    retried_at: float  # in seconds of `time.monotonic`

    def is_the_same(self, files: AdapterFiles) -> bool:
        """Returns whether another attempt to read it would most likely fail again."""
        return files == self.files and time.monotonic() < self.retried_at


class AdapterLoader:
    """Changes the adapters of all engines, and then their names. The changes of one name wait for each other."""

    def __init__(self, names: AdapterNames, llm: EngineClient, *, finds: bool):
        """Takes the names. If it `finds` adapters, it looks for unknown ones in the directory of `names`."""
        self._names = names
        self._llm = llm
        self._finds = finds
        self._failed: dict[str, FailedAdapter] = {}  # by name; there are no more than directories
        self._changes: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by the adapter's name

    async def load(self, name: str, path: str, replaces: bool) -> LoRARequest:
        """Lets requests name an adapter once all engines have read it. With `replaces` its name may be in use.

        Raises ApiError and ParameterError for one that may not be loaded, or cannot. Then nothing has changed.
        """
        async with self._change(name):
            return await self._load(name, path, replaces)

    async def unload(self, name: str) -> LoRARequest:
        """Takes the name of an adapter away. Raises ApiError where nobody has it."""
        async with self._change(name):
            adapter = self._names.remove(name)
            await self._llm.ask(UnloadAdapter(adapter.lora_int_id))
            return adapter

    async def find(self, name: str) -> None:
        """Loads the adapter whose directory has that name, unless the name is known or there is no such directory.

        However many requests name it at once, it is read once. Raises ParameterError for one that cannot be read. It
        is not read again until its files change, or `RETRY_SECONDS` have passed.
        """
        if not self._finds or self._names.is_known(name):
            return
        async with self._change(name):
            files = await run_in_threadpool(self._names.files_of, name)
            failed = self._failed.pop(name, None)
            if self._names.is_known(name) or files is None:
                return
            if failed is None or not failed.is_the_same(files):
                try:
                    await self._load(name, name, replaces=False)
                    return
                except ParameterError as error:
                    failed = FailedAdapter(str(error), files, time.monotonic() + RETRY_SECONDS)
            self._failed[name] = failed
            raise ParameterError(failed.reason, "model")

    async def _load(self, name: str, path: str, replaces: bool) -> LoRARequest:
        adapter = await run_in_threadpool(self._names.prepared, name, path, replaces)
        try:
            await self._llm.ask(LoadAdapter(adapter.lora_name, adapter.lora_int_id, adapter.lora_path))
        except (ValueError, NotImplementedError) as error:
            await self._llm.ask(UnloadAdapter(adapter.lora_int_id))  # another engine may have read it
            raise ParameterError(str(error), "lora_path") from error
        before = self._names.get(name)
        self._names.add(adapter)
        if before is not None:
            await self._llm.ask(UnloadAdapter(before.lora_int_id))
        logger.info("the adapter %.60s is loaded", name)
        return adapter

    def _change(self, name: str) -> asyncio.Lock:
        return self._changes.setdefault(name, asyncio.Lock())
