"""What a number names: one content, however often it is read."""

from pathlib import Path

import pytest

from jaxvllm.core.lora import LoraAdapter, LoRARequest
from jaxvllm.engine.lora_store import LoraStore


def test_a_number_stands_for_what_was_read_first() -> None:
    contents = {Path("/a"): b"old", Path("/b"): b"other"}
    store = LoraStore(lambda path, name: LoraAdapter(name, contents[path], None), num_kept=1)
    one, other = LoRARequest("one", 1, "/a"), LoRARequest("other", 2, "/b")
    assert store.get(one).digest == b"old"
    contents[Path("/a")] = b"new"
    assert store.get(one).digest == b"old", "it is in memory"
    store.get(other)  # takes its place
    for _ in range(2):
        with pytest.raises(ValueError, match="the adapter 'one' have changed since lora_int_id 1 named them"):
            store.get(one)
    used = store.get(other)
    store.get(LoRARequest("one", 3, "/a"))
    assert store.get(other) is used, "a request has it, and another one shares it"
    del used
    assert store.get(LoRARequest("one", 3, "/a")).digest == b"new"
    store.get(other)
    contents[Path("/a")] = b"old"
    assert store.get(one).digest == b"old", "the files are as they were"
    used = store.get(one)
    store.forget(1)
    contents[Path("/a")] = b"new"
    assert store.get(one) is not used, "whoever still has the old one"
    assert store.get(one).digest == b"new"
