"""A router's index follows a replica over ZeroMQ, from before it listened to after the replica was started again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from jaxvllm.core.kv_events import hash_key
from jaxvllm.core.kv_events_config import KVEventsConfig
from jaxvllm.core.page_pool import extend_page_hashes
from jaxvllm.core.prefix_index import KVEventReader, PrefixIndex
from jaxvllm.engine.kv_event_publisher import KVEventPublisher
from jaxvllm.worker import kv_event_subscriber
from jaxvllm.worker.kv_event_subscriber import follow_kv_events
from tests.core.test_kv_events import request_of
from tests.waiting import until


def config_in(directory: Path, **options: object) -> KVEventsConfig:
    given = {"endpoint": f"ipc://{directory}/events", "replay_endpoint": f"ipc://{directory}/replay"} | options
    return KVEventsConfig.read({"enable_kv_cache_events": True} | given)


def publish(publisher: KVEventPublisher, token: int) -> int:
    """Publishes a page of that token. Returns its key."""
    request = request_of([token] * 2)
    hashes = extend_page_hashes([], request.token_ids(), 2, None)
    publisher.log.stored(0, "full_attention", None, [0], hashes, request)
    publisher.flush()
    return hash_key(hashes[0])


@asynccontextmanager
async def following(index: PrefixIndex, config: KVEventsConfig) -> AsyncIterator[None]:
    endpoint, replay = config.of_replica(0)
    task = asyncio.create_task(follow_kv_events(KVEventReader(index, "a"), endpoint, replay))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_an_index_follows_a_publisher_and_the_next_one(tmp_path: Path) -> None:
    config, index = config_in(tmp_path), PrefixIndex()

    async def known(publisher: KVEventPublisher, key: int) -> None:
        """Waits for `key`. Publishes on meanwhile: a subscriber learns of a gap by the next batch."""

        def is_known() -> bool:
            publish(publisher, 0)
            return bool(index.num_cached("a", [key]))

        await until(is_known)

    async def run() -> None:
        first = KVEventPublisher(config, 0, page_size=2)
        old = [publish(first, token) for token in (1, 2)]
        async with following(index, config):
            await until(lambda: index.num_cached("a", old) == 2)  # published before anybody listened
            await known(first, publish(first, 3))
            first.close()
            second = KVEventPublisher(config, 0, page_size=2)
            await known(second, publish(second, 4))
            assert index.num_cached("a", old) == 0, "the pages of an engine that has ended"
            second.close()

    asyncio.run(run())


def test_what_is_lost_for_good_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_subscriber, "REPLAY_SECONDS", 0.05)
    config, index = config_in(tmp_path, buffer_steps=1), PrefixIndex()
    missing = config_in(tmp_path, replay_endpoint=f"ipc://{tmp_path}/nobody")

    async def run() -> None:
        publisher = KVEventPublisher(config, 0, page_size=2)
        old = [publish(publisher, token) for token in (1, 2, 3)]
        async with following(index, config):  # the buffer has only the last one
            await until(lambda: index.num_cached("a", old[2:]))
            assert index.num_cached("a", old[:1]) == 0
        index.forget("a")
        async with following(index, missing):

            def is_known() -> bool:
                return bool(index.num_cached("a", [publish(publisher, 4)]))

            await until(is_known)
        publisher.close()

    asyncio.run(run())
