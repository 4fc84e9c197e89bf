"""What is forgotten, and that memory counts as long as something uses it."""

from concurrent.futures import Future

import numpy as np
import pytest

from jaxvllm.core.errors import OverloadedError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.cache import MAX_CACHED, MAX_TEXT_BYTES, GrammarCache
from jaxvllm.grammar.constraint import CompiledGrammar
from tests.grammar.demo import compiled


def add(cache: GrammarCache, name: str, num_bytes: int) -> Future[CompiledGrammar]:
    """A grammar that takes so much memory, as the compiler adds it."""
    params = StructuredOutputsParams(regex=name)
    future, is_new = cache.get_or_add(params)
    assert is_new
    cache.reserve(num_bytes)
    grammar = CompiledGrammar(compiled(choice=("x",)).matcher, np.zeros(64, np.int32), (), ())
    cache.store(params, future, grammar, num_bytes)
    return future


def is_known(cache: GrammarCache, name: str) -> bool:
    return any(params.regex == name for params in cache._entries)


def test_what_was_used_longest_ago_is_forgotten() -> None:
    cache = GrammarCache()
    for number in range(MAX_CACHED + 10):
        cache.get_or_add(StructuredOutputsParams(regex=f"a{number}"))
        assert not cache.get_or_add(StructuredOutputsParams(regex="a0"))[1], "it is used all the time"
    assert len(cache) == MAX_CACHED and not is_known(cache, "a1")
    for letter in "bcdefghijklmnopqrstuvwxyz":
        cache.get_or_add(StructuredOutputsParams(regex=letter * 2**20))
    assert len(cache) == MAX_TEXT_BYTES // 2**20 == cache.text_bytes // 2**20


def test_grammars_are_forgotten_before_they_take_too_much_memory() -> None:
    cache = GrammarCache(max_bytes=100)
    failed, _ = cache.get_or_add(StructuredOutputsParams(regex="failed"))
    for name in ("a", "b", "c"):
        add(cache, name, 40)
        assert cache.num_bytes <= 100
    assert [is_known(cache, name) for name in ("a", "b", "c", "failed")] == [False, True, True, True]
    cache.reserve(20)  # nothing has to go for it
    cache.release(20)
    assert cache.num_bytes == 80
    add(cache, "large", 1000)  # alone it may be larger than all: the compiler has its own limit of one
    assert cache.num_bytes == 1000


def test_the_memory_of_a_grammar_counts_until_no_request_uses_it() -> None:
    cache = GrammarCache(max_bytes=100)
    used = add(cache, "a", 60).result().constraint()
    with pytest.raises(OverloadedError, match="unfinished requests"):
        cache.reserve(60)
    assert cache.num_bytes == 60 and not is_known(cache, "a")
    del used
    assert cache.num_bytes == 0
    cache.reserve(60)


def test_a_grammar_that_failed_for_now_is_forgotten() -> None:
    cache = GrammarCache()
    params = StructuredOutputsParams(regex="a")
    failed, _ = cache.get_or_add(params)
    cache.forget(params, failed)
    again, is_new = cache.get_or_add(params)
    assert is_new and again is not failed
    cache.forget(params, failed)
    assert is_known(cache, "a") and cache.text_bytes == 1
