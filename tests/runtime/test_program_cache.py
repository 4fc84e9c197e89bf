"""Compiled programs on disk: entries are whole or not there, and a damaged one is replaced."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from jaxvllm.runtime.program_cache import WholeEntries, use_persistent_cache


@pytest.mark.usefixtures("no_cache")
def test_a_cache_directory_that_the_user_chose_stays(tmp_path: Path) -> None:
    use_persistent_cache(tmp_path / "ours")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "ours")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    use_persistent_cache(tmp_path / "ours")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("kept", [0, 1, 0.5], ids=["empty", "one byte", "half"])
def test_a_truncated_entry_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: float) -> None:
    """With jax itself, whose own cache leaves the entry as it is and warns at each start."""
    use_persistent_cache(tmp_path)

    def run() -> float:
        jax.clear_caches()  # as a new process
        return float(jax.jit(lambda x: jnp.sin(x) * 3)(2.0))

    expected = run()
    entries = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert entries
    for path, content in entries.items():
        path.write_bytes(content[: int(kept if kept == 1 else kept * len(content))])
    with caplog.at_level(logging.WARNING, "jaxvllm"):
        assert run() == expected
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} has damaged programs: they are compiled and stored again"
    ]
    cache = WholeEntries(tmp_path)
    assert all(cache.get(path.name.removesuffix("-cache")) for path in entries)
    caplog.clear()
    assert run() == expected and not caplog.records


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = WholeEntries(tmp_path)
    old, new = (compilation_cache.compress_executable(text * 100) for text in (b"old", b"new"))
    cache.put("program", old)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:  # what was written so far is there, under another name
        patch.setattr("os.replace", full)
        cache.put("program", new)
        cache.put("other", new)
    assert [path.name for path in tmp_path.iterdir()] == ["program-cache"]
    assert cache.get("program") == old and cache.get("other") is None
    [record] = caplog.records
    assert record.levelname == "WARNING" and "No space left on device" in record.message
    cache.put("program", new)
    assert cache.get("program") == new


def test_a_directory_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = WholeEntries(tmp_path / "file" / "cache")
    cache.put("program", b"x")
    assert cache.get("program") is None
    assert {record.levelname for record in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_entries_may_be_read_by_others_as_far_as_the_umask_says_and_written_by_nobody(
    tmp_path: Path, umask: int
) -> None:
    content = compilation_cache.compress_executable(b"program")
    before = os.umask(umask)
    try:
        WholeEntries(tmp_path).put("program", content)
    finally:
        os.umask(before)
    assert (tmp_path / "program-cache").stat().st_mode & 0o777 == 0o644 & ~umask
    assert WholeEntries(tmp_path).get("program") == content
    (tmp_path / "program-cache").chmod(0o664)  # somebody else may have written it
    assert WholeEntries(tmp_path).get("program") is None


@pytest.mark.usefixtures("no_cache")
def test_an_empty_directory_name_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", "")
    use_persistent_cache(tmp_path / "ours")
    jax.clear_caches()
    jax.jit(lambda x: jnp.cos(x) * 5)(2.0)
    assert not list(tmp_path.iterdir())
