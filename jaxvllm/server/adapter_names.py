"""`AdapterNames`: the adapters that requests may name as their model, and where new ones may come from."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from jaxvllm.core.lora import LoRARequest
from jaxvllm.server.errors import ApiError

# The names of directories that requests may name without loading them first: no path, and nothing that is hidden.
_DIRECTORY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

# What tells each file of an adapter from a changed one, by its name.
type AdapterFiles = Mapping[str, tuple[int, int, int]]


def read_modules(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns the names and directories of the adapters in `--lora-modules`, each of which is NAME=PATH or vLLM's JSON.

    Raises ValueError for others, and for names that come twice.
    """
    modules = []
    for one in given:
        if one.startswith("{"):
            try:
                values = json.loads(one)
                name, path = values.pop("name"), values.pop("path")
                unknown = sorted(values.keys() - {"base_model_name"})
            except (ValueError, KeyError) as error:
                raise ValueError(f"lora_modules must be NAME=PATH, or JSON with name and path, not {one!r}") from error
            if unknown:
                raise ValueError(f"lora_modules knows no {unknown[0]}: leave it out")
        else:
            name, _, path = one.partition("=")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise ValueError(f"lora_modules must be NAME=PATH, or JSON with name and path, not {one!r}")
        modules.append((name, path))
    names = [name for name, _ in modules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"lora_modules names {twice} twice: give each adapter a name of its own")
    return tuple(modules)


class AdapterNames:
    """The adapters of one server by their names. Each that is added has a number of its own, also under an old name."""

    def __init__(self, modules: Sequence[tuple[str, str]], models: Collection[str], directory: str | None):
        """Begins with `modules`. `directory` has all adapters that may be added later; None: there may be none.

        Raises ValueError for an adapter with one of the names of the model, `models`.
        """
        self._numbers = count(1)
        self._models = models
        self._directory = None if directory is None else Path(directory).resolve()
        self._requests: dict[str, LoRARequest] = {}
        for name, path in modules:
            if name in models:
                raise ValueError(f"lora_modules has the name {name!r}, which is that of the model: give another")
            self._requests[name] = self._numbered(name, path)

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter([*self._requests.values()])

    def get(self, name: str) -> LoRARequest | None:
        """Returns the adapter of that name, if there is one."""
        return self._requests.get(name)

    def is_known(self, name: str) -> bool:
        """Returns whether the model or an adapter has that name."""
        return name in self._models or name in self._requests

    def files_of(self, name: str) -> AdapterFiles | None:
        """Returns the files of the adapter in the directory of that name, or None if no adapter there could be added.

        The values are equal as long as no file there has changed.
        """
        if self._directory is None or not _DIRECTORY_NAME.fullmatch(name):
            return None
        try:
            found = self._allowed(name)
            if not (found / "adapter_config.json").is_file():
                return None
            stats = {file.name: file.stat() for file in found.iterdir() if file.name.startswith("adapter_")}
        except (ApiError, OSError):  # what leads out of the directory is nothing to those who guess names
            return None
        # The time of the last change of status, because it moves with permissions and with renaming, too.
        return {file: (stat.st_ino, stat.st_size, stat.st_ctime_ns) for file, stat in stats.items()}

    def prepared(self, name: str, path: str, replaces: bool) -> LoRARequest:
        """Returns an adapter that could be added. Raises ApiError where its name is in use, or its path not allowed.

        With `replaces` there may be one of that name.
        """
        if not name or not path:
            raise ApiError(400, "lora_name and lora_path must not be empty", param="lora_name" if path else "lora_path")
        if name in self._models:
            raise ApiError(400, f"{name!r} is a name of the model itself: give another", param="lora_name")
        if name in self._requests and not replaces:
            raise ApiError(
                400, f"the adapter {name!r} is loaded already: unload it, or set load_inplace", param="lora_name"
            )
        return self._numbered(name, str(self._allowed(path)))

    def add(self, request: LoRARequest) -> None:
        """Lets requests name an adapter that was `prepared`, and that the engines could read."""
        self._requests[request.lora_name] = request

    def remove(self, name: str) -> LoRARequest:
        """Takes the name away, and returns whose it was. Requests that run go on. Raises ApiError if it has none."""
        if name not in self._requests:
            raise ApiError(404, f"the adapter {name!r} is not loaded", param="lora_name")
        return self._requests.pop(name)

    def _numbered(self, name: str, path: str) -> LoRARequest:
        return LoRARequest(name, next(self._numbers), path)

    def _allowed(self, path: str) -> Path:
        """Returns a path without links, which is within the directory. An error tells nothing of what is elsewhere."""
        assert self._directory is not None, "there are no endpoints without a directory"
        try:
            found = (self._directory / path).resolve()
            is_within, is_directory = found.is_relative_to(self._directory), found.is_dir()
        except (OSError, ValueError, RuntimeError):  # a name that is too long, has a zero byte, or goes in circles
            is_within = is_directory = False
        if not is_within:
            raise ApiError(400, "lora_path must be within the server's lora_directory", param="lora_path")
        if not is_directory:
            raise ApiError(400, "lora_path is no directory there", param="lora_path")
        files = [one for one in found.iterdir() if one.name.startswith("adapter_")]
        if any(not one.resolve().is_relative_to(self._directory) for one in files):
            raise ApiError(400, "lora_path has links that lead out of the server's lora_directory", param="lora_path")
        return found
