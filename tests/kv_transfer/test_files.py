"""Pages in files: what one engine forgets, others still find."""

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxvllm.kv_transfer.file_connector import PAUSE_SECONDS, FileConnector
from jaxvllm.kv_transfer.page_format import PageFormat
from tests.kv_transfer.conftest import Clock, assert_same, some_page

REQUEST: Any = None  # pages are anybody's
NAMES = [bytes([number]) * 32 for number in range(2)]


def test_after_a_reset_only_what_is_written_since_is_there(form: PageFormat, tmp_path: Path) -> None:
    one, other = FileConnector(tmp_path, form), FileConnector(tmp_path, form)
    for number, digest in enumerate(NAMES):
        one.save(digest, some_page(form, number))
    one.reset()
    assert one.num_pages(REQUEST, NAMES) == 0 and one.wants(REQUEST, NAMES[0])
    assert other.num_pages(REQUEST, NAMES) == 2 and not other.wants(REQUEST, NAMES[0])
    page = some_page(form, 7)
    other.save(NAMES[0], page)
    written = os.stat(other.path(NAMES[0]))
    os.utime(other.path(NAMES[0]), ns=(written.st_atime_ns, written.st_mtime_ns + 10**9))  # clocks have ticks
    assert one.num_pages(REQUEST, NAMES) == 1 and not one.wants(REQUEST, NAMES[0])
    [found] = one.load(REQUEST, NAMES[:1]).result()
    assert_same(found, page)
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {digest.hex() for digest in NAMES}
    for connector in (one, other):
        connector.close()


@pytest.fixture
def files(form: PageFormat, tmp_path: Path, clock: Clock) -> Iterator[FileConnector]:
    connector = FileConnector(tmp_path, form, clock)
    yield connector
    connector.close()


def swap(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def damage(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def grow(path: Path, other: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # it takes no room on the disk, and would take all memory


def pipe(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [swap, damage, grow, pipe, endless, folder], ids=lambda harm: harm.__name__)
def test_what_is_in_place_of_a_page_is_absent_and_replaced(
    files: FileConnector,
    form: PageFormat,
    clock: Clock,
    harm: Callable[[Path, Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number, digest in enumerate(NAMES):
        assert files.save(digest, some_page(form, number))
    harm(*map(files.path, NAMES))
    for _ in range(3):  # it is told once, and not asked for again
        pages = files.load(REQUEST, NAMES).result(timeout=60)
        assert pages == []
    assert len(caplog.records) == 1 and "is not used" in caplog.text
    assert files.num_pages(REQUEST, NAMES) == 0 and files.wants(REQUEST, NAMES[0])
    if files.save(NAMES[0], some_page(form, 0)):  # a file cannot replace a folder, but all else
        assert files.num_pages(REQUEST, NAMES) == 2
        for number, page in enumerate(files.load(REQUEST, NAMES).result()):
            assert_same(page, some_page(form, number))
    assert files.save(NAMES[0], some_page(form, 0)) == (harm is not folder)


def left_over(directory: Path) -> list[Path]:
    return list((directory / ".partial").iterdir())


@pytest.mark.parametrize("what", ["replace", "fdopen"])
def test_a_full_disk_pauses_the_store(
    files: FileConnector,
    form: PageFormat,
    clock: Clock,
    tmp_path: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{what}", full)
        assert [files.save(digest, some_page(form, 0)) for digest in NAMES * 5] == [False] * 10
    [record] = caplog.records
    assert "No space left on device" in record.getMessage() and record.exc_info is None
    assert not files.wants(REQUEST, NAMES[0]) and not left_over(tmp_path)
    assert not files.save(NAMES[0], some_page(form, 0))  # it was on its way
    clock.now += PAUSE_SECONDS
    assert files.wants(REQUEST, NAMES[0]) and files.save(NAMES[0], some_page(form, 0))
    assert files.num_pages(REQUEST, NAMES) == 1 and not left_over(tmp_path)


def test_what_a_killed_process_left_is_deleted(form: PageFormat, tmp_path: Path) -> None:
    FileConnector(tmp_path, form).close()
    old, new = tmp_path / ".partial" / "old", tmp_path / ".partial" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    FileConnector(tmp_path, form).close()
    assert left_over(tmp_path) == [new]


def test_nothing_is_there_until_the_weights_are_named(form: PageFormat, tmp_path: Path) -> None:
    name: Future[str] = Future()
    connector = FileConnector(tmp_path, replace(form, model=name))
    page = some_page(form, 0)
    assert not connector.wants(REQUEST, NAMES[0]) and connector.num_pages(REQUEST, NAMES) == 0
    assert not connector.save(NAMES[0], page)
    name.set_result("a model")
    assert connector.wants(REQUEST, NAMES[0]) and connector.save(NAMES[0], page)
    connector.close()
    failed: Future[str] = Future()
    failed.set_exception(OSError("the weights have gone"))
    connector = FileConnector(tmp_path, replace(form, model=failed))
    assert not connector.wants(REQUEST, NAMES[0]) and connector.num_pages(REQUEST, NAMES) == 0
    connector.close()
