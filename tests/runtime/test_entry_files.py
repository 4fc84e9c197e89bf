"""Files of a cache: what is left over is deleted, and so is what nobody has used for the longest time."""

import os
from pathlib import Path

from jaxvllm.runtime.entry_files import EntryFiles


def test_what_a_killed_process_left_is_deleted(tmp_path: Path) -> None:
    old, new = tmp_path / ".partial-old", tmp_path / ".partial-new"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    EntryFiles(tmp_path, "-program").clean_up(max_bytes=None)
    assert [path.name for path in tmp_path.iterdir()] == [new.name], "the other may be under way"


def test_the_entries_used_least_recently_go_first(tmp_path: Path) -> None:
    files = EntryFiles(tmp_path, "-program")
    for age, name in enumerate("dcba"):
        files.write(name, bytes(100))
        os.utime(tmp_path / f"{name}-program", (1000 - age, 1000 - age))
    (tmp_path / "another-cache").write_bytes(bytes(1000))
    assert files.read("a") == bytes(100), "the oldest, and used now"
    files.clean_up(max_bytes=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-program", "another-cache", "d-program"]
    files.clean_up(max_bytes=None)
    files.clean_up(max_bytes=200)
    assert files.read("a") and files.read("d")
