"""`Transfer`: how the keys and values of a prompt get from one pool of replicas to another, and when they are there."""

from dataclasses import dataclass

import numpy as np

from jaxvllm.core.kv_cache import KVCache
from jaxvllm.core.request import Request


@dataclass(frozen=True)
class Transfer:
    """The link of a replica: one transfer after the other, each at full speed."""

    token_bytes: float  # keys and values of a token, in all layers
    bandwidth: float = 25e9  # bytes/s; the default is a 200 Gbit/s network card
    latency: float = 1e-3  # seconds from the last byte of one side to the other side's next step

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or self.latency < 0:
            raise ValueError(
                f"a transfer needs a bandwidth above 0 and a latency of at least 0, not {self.bandwidth} bytes/s and "
                f"{self.latency} s"
            )

    def seconds(self, num_tokens: int) -> float:
        """Returns the time in which the link is taken by so many tokens, without the latency."""
        return num_tokens * self.token_bytes / self.bandwidth


def has_room(cache: KVCache, request: Request) -> bool:
    """Returns whether `import_pages` may be called, because there is room for the whole request."""
    return cache.can_take(cache.match(_full_pages(cache, request)), request.num_tokens)


def import_pages(cache: KVCache, request: Request) -> None:
    """Puts the full pages of a prompt into the cache, as if they had been computed here.

    The request finds them when it is admitted, and computes only the tokens after them. Nobody owns the pages until
    then, so it must be admitted next.
    """
    hashes = _full_pages(cache, request)
    prefix = cache.match(hashes)
    missing = hashes[prefix.num_pages :]
    for group, pages in zip(cache.groups, prefix.pages, strict=True):
        group.pool.share(pages)  # or they might be evicted for the others
        new = group.pool.allocate(len(missing))
        group.pool.register(new.tolist(), missing)
        group.pool.release(new)
        group.pool.release(np.array(pages, np.int32))


def _full_pages(cache: KVCache, request: Request) -> list[bytes]:
    return request.hashes(cache.page_size)[: (request.num_tokens - 1) // cache.page_size]
