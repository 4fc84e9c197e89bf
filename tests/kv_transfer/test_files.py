"""Pages in files: what one engine forgets, others still find."""

import os
from pathlib import Path
from typing import Any

from jaxvllm.kv_transfer.file_connector import FileConnector
from jaxvllm.kv_transfer.page_format import PageFormat
from tests.kv_transfer.conftest import assert_same, some_page

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
