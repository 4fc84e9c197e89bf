"""The KV pages that travel with an exported request."""

from collections.abc import Mapping, Sequence

from jaxvllm.core.request import Request
from jaxvllm.engine.page_moves import HostMoves
from jaxvllm.engine.replica import Replica
from jaxvllm.kv_transfer.page_format import Page, PageFormat


def load_cargo(replica: Replica, form: PageFormat, requests: Sequence[Request]) -> dict[bytes, bytes]:
    """Returns the full pages of `requests`, which have just left the scheduler of `replica`, by their hashes.

    They are those that the prefix cache has: none where it is turned off. It waits for the device.
    """
    cache, moves, cargo = replica.scheduler.cache, HostMoves(replica.runner, form), dict[bytes, bytes]()
    for request in requests:
        hashes = request.hashes(cache.page_size)
        prefix = cache.match(hashes)
        columns = cache.columns(prefix)
        new = [column for column in range(prefix.num_pages) if hashes[column] not in cargo]
        columns = tuple(of_group[new] for of_group in columns)
        pages = moves.read(columns, moves.copy(columns))
        cargo |= {hashes[column]: form.encode(hashes[column], page) for column, page in zip(new, pages, strict=True)}
    return cargo


def unload_cargo(replica: Replica, form: PageFormat, request: Request, cargo: Mapping[bytes, bytes]) -> int:
    """Puts pages for `request` into the prefix cache of `replica`, if there is room, and returns how many.

    Only pages that the cache lacks are put there, in their order. Raises WrongPage for one that was damaged.
    """
    cache = replica.scheduler.cache
    hashes = request.hashes(cache.page_size) if cache.enable_prefix_caching else []
    prefix = cache.match(hashes)
    pages: list[Page] = []
    for digest in hashes[prefix.num_pages :]:
        if digest not in cargo:
            break
        pages.append(form.decode(digest, cargo[digest]))
    reserved = cache.reserve(prefix, len(pages)) if pages else None
    if reserved is None:
        return 0
    count = HostMoves(replica.runner, form).write(reserved.pages, pages)
    cache.register_filled(request, reserved, count)
    cache.give_back(reserved)
    return count
