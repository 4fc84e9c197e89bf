"""Compiled programs on disk, found by their recipes: a start that finds them traces nothing.

Reading an entry unpickles it, so whoever can write entries can run code here. So they are in a directory that belongs
to this user and that nobody else can write to, or else they are neither read nor written. Each file is asked the same
when it is open, before anything of it is used.
"""

import hashlib
import logging
import os
import pickle
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from jaxvllm.runtime.entry_files import EntryFiles, make_private
from jaxvllm.runtime.program_cache import set_aside
from jaxvllm.runtime.recipe import NoName, Recipe, sources_digest
from jaxvllm.runtime.stored_kernels import StoredKernels
from pallas_kernels.cpu.handlers import register_code, registered_code

logger = logging.getLogger(__name__)

# The ladder of the demo model takes 5 MB. Each change of the sources adds as much until the oldest entries go.
MAX_BYTES = 2**30
_DIGEST_BYTES = 32
# Level 1 makes 110 KB of a program of 510 KB in 4 ms, level 6 makes 92 KB of it in 11 ms.
_COMPRESSION = 1


class StoredPrograms:
    """Makes programs from recipes: loads those that an earlier start has left in the directory, compiles the others."""

    def __init__(self, directory: Path | None):
        """Makes the directory if it is not there, and cleans it up. None: programs are compiled, and not stored."""
        self._files: EntryFiles | None = None
        self._kernels: StoredKernels | None = None
        self._were_loaded: list[bool] = []  # one a program; threads append to it
        if directory is not None and make_private(directory):
            self._files = EntryFiles(directory, "-program", is_private=True)
            self._files.clean_up(MAX_BYTES)
            self._kernels = StoredKernels(directory)
            # Before threads make programs: each of them would read all sources, a third of a second on two cores.
            with suppress(NoName):
                sources_digest()

    @classmethod
    def beside(cls, cache_directory: Path) -> "StoredPrograms":
        """Opens the programs of this user. Several users may share jax's own cache, which holds no code of Python's."""
        return cls(cache_directory / f"programs-of-user-{os.getuid()}")

    @property
    def num_loaded(self) -> int:
        return sum(self._were_loaded)

    @property
    def num_compiled(self) -> int:
        return len(self._were_loaded) - self.num_loaded

    def make(self, recipe: Recipe) -> jax.stages.Compiled:
        """Returns the program of `recipe`, loaded if possible. One that was compiled is stored for the next start."""
        name = None if self._files is None else _name(recipe)
        program = None if self._files is None or name is None else _load(self._files, name, recipe)
        self._were_loaded.append(program is not None)
        if program is not None:
            return program
        if self._files is None or name is None:
            return recipe.compile(self._kernels)
        return _compile_and_store(self._files, name, recipe, self._kernels)


def _name(recipe: Recipe) -> str | None:
    try:
        return recipe.name()
    except NoName as error:
        logger.debug("a program is not stored: %s", error)
        return None


def _load(files: EntryFiles, name: str, recipe: Recipe) -> jax.stages.Compiled | None:
    content = files.read(name)
    if content is None:
        return None
    devices = list(recipe.mesh.devices.flat)
    try:
        digest, packed = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(packed).digest() != digest:
            raise ValueError("it is not what was written")
        handlers, serialized, in_tree, out_tree = pickle.loads(zlib.decompress(packed))
        register_code(handlers)  # the program calls them by their names
        return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, devices[0].client, devices)
    except Exception as error:  # whatever is wrong with it, the program is compiled instead
        files.discard(name, error)
        return None


def _compile_and_store(
    files: EntryFiles, name: str, recipe: Recipe, kernels: StoredKernels | None
) -> jax.stages.Compiled:
    # A function that jax does not know: of one that this process has compiled before it remembers the program, and that
    # may come from jax's cache.
    unknown = replace(recipe, run=partial(recipe.run))
    with set_aside():
        program = unknown.compile(kernels)
    try:
        # All handlers of this process: they are few (50 KB of the demo model), and nothing says which of them a program
        # calls.
        content = (registered_code(), *serialize_executable.serialize(program))
        packed = zlib.compress(pickle.dumps(content), _COMPRESSION)
    except Exception:  # such as for a plugin that cannot: the program is compiled at each start
        logger.debug("a program cannot be stored", exc_info=True)
    else:
        files.write(name, hashlib.sha256(packed).digest() + packed)
    return program
