"""`LoraStore`: the adapters in host memory, from which they come to the devices."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.lora import LoraAdapter, LoRARequest


class LoraStore:
    """Keeps the `num_kept` adapters that were asked for last. A request that is under way keeps its own as well.

    No adapter is read while requests still have it: they share one copy, however many adapters are in use.

    An id stands for the content that was read first. One that is read again must have it still: a user who has changed
    the files would otherwise get the old adapter or the new one, whichever was in memory.
    """

    def __init__(self, read: Callable[[Path, str], LoraAdapter], num_kept: int):
        """Begins without adapters. `read` reads one from a directory, and raises ValueError for a wrong one."""
        self._read = read
        self._num_kept = num_kept
        self._first: dict[int, tuple[LoRARequest, bytes]] = {}  # by id, with the digest
        self._kept: OrderedDict[int, LoraAdapter] = OrderedDict()  # by id, least recently used first
        self._in_use: WeakValueDictionary[int, LoraAdapter] = WeakValueDictionary()  # by id, while anybody has it

    def get(self, request: LoRARequest) -> LoraAdapter:
        """Returns the adapter of `request`, which is read where it is not kept.

        Raises ValueError for one that cannot be read, and for an id that stands for another adapter. Then nothing has
        changed.
        """
        known, digest = self._first.get(request.lora_int_id, (request, None))
        if known != request:
            raise ParameterError(
                f"lora_int_id {request.lora_int_id} is that of {known.lora_name!r}, from {known.lora_path}: "
                "give another",
                "lora_request",
            )
        adapter = self._in_use.get(request.lora_int_id)
        if adapter is None:
            try:
                adapter = self._read(Path(request.lora_path), request.lora_name)
            except (ValueError, NotImplementedError, OSError) as error:
                # The client of a server knows the name and not the path.
                text = str(error).replace(request.lora_path, request.lora_name)
                raise ParameterError(f"the adapter {request.lora_name!r}: {text}", "lora_request") from error
        if adapter.digest != (digest or adapter.digest):
            raise ParameterError(
                f"the files of the adapter {request.lora_name!r} have changed since lora_int_id "
                f"{request.lora_int_id} named them: give another, or on a server load it with load_inplace",
                "lora_request",
            )
        self._first[request.lora_int_id] = request, adapter.digest
        self._kept[request.lora_int_id] = self._in_use[request.lora_int_id] = adapter
        self._kept.move_to_end(request.lora_int_id)
        while len(self._kept) > self._num_kept:
            self._kept.popitem(last=False)
        return adapter

    def with_digest(self, digest: bytes) -> LoraAdapter | None:
        """Returns the adapter with this digest that is in memory under some id, if there is one."""
        return next((adapter for adapter in self._in_use.values() if adapter.digest == digest), None)

    def forget(self, number: int) -> None:
        """Forgets the adapter with this id, if there is one, and whose id it was."""
        self._first.pop(number, None)
        self._kept.pop(number, None)
        self._in_use.pop(number, None)
