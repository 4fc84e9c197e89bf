"""The name of an engine's model, which tells whether pages of another engine are its own: found beside all else."""

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxvllm.models.weights_name import file_digest, identity, weight_files, weights_name
from jaxvllm.runtime.entry_files import EntryFiles, make_private
from jaxvllm.runtime.programs import COMPILE_NICENESS

logger = logging.getLogger(__name__)

# Threads that hash. One hashes 0.4 GB/s and more, so four name a model of 16 GB in some 10 s.
_MOST_THREADS = 4
# A file that changed less than so long before it was read may change once more and keep its time: it is read again.
SETTLED_SECONDS = 2.0
# Each digest has 32 bytes.
_MOST_CACHED_BYTES = 1 << 20


@dataclass(frozen=True)
class NamedWeights:
    """What a name is made of: directories of weights, those that are read and those of which only the config counts."""

    directory: Path
    has_weights: bool = True  # False: they are random numbers, and no file is read


def name_model(weights: Sequence[NamedWeights], rest: str, cache_directory: Path | None) -> Future[str]:
    """Begins to name a model by all bytes of its `weights`, in threads of low priority. The name ends with `rest`.

    The digest of a file is kept in `cache_directory`, for as long as the file has the same inode, size and times.
    """
    future: Future[str] = Future()
    digests = FileDigests(cache_directory)

    def run() -> None:
        start = time.monotonic()
        try:
            names = [_name(one, digests) for one in weights]
        except Exception as error:
            logger.warning("the weights could not be named, so no pages are exchanged: %s", error)
            future.set_exception(error)
            return
        logger.info("the weights were named after %.2f s: %s", time.monotonic() - start, " ".join(names))
        future.set_result(" ".join((*names, rest)))

    threading.Thread(target=run, name="jaxvllm-name-weights", daemon=True).start()
    return future


def _name(weights: NamedWeights, digests: "FileDigests") -> str:
    files = weight_files(weights.directory) if weights.has_weights else ()
    return weights_name(weights.directory, files, digests.of)


class FileDigests:
    """Digests of whole files, which are read once and then found in a cache of this user's."""

    def __init__(self, cache_directory: Path | None):
        self._entries: EntryFiles | None = None
        if cache_directory is not None:
            directory = cache_directory / f"digests-of-user-{os.getuid()}"
            if make_private(directory):
                self._entries = EntryFiles(directory, "-digest", is_private=True)
                self._entries.clean_up(_MOST_CACHED_BYTES)

    def of(self, path: Path) -> bytes:
        """Returns the digest of a file. Raises OSError where it cannot be read."""
        found = os.stat(path)
        key = hashlib.sha256(f"{path.resolve()} {identity(found)}".encode(errors="surrogateescape")).hexdigest()
        kept = None if self._entries is None else self._entries.read(key)
        if kept is not None and len(kept) == hashlib.sha256().digest_size:
            return kept
        is_settled = time.time() - max(found.st_mtime, found.st_ctime) > SETTLED_SECONDS
        with ThreadPoolExecutor(_num_threads(), "jaxvllm-hash-weights", _give_way) as threads:
            digest = file_digest(path, threads.map)
        if self._entries is not None and is_settled:
            self._entries.write(key, digest)
        return digest


def _num_threads() -> int:
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))


def _give_way() -> None:
    """Lets the start and steps have the processor first."""
    if sys.platform == "linux":  # on other systems this would change the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
