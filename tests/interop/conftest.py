"""One real server for all clients."""

from collections.abc import Iterator

import pytest

from tests.faults.server import OPTIONS, Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("interop") / "log"
    with serving(log, OPTIONS) as server:
        yield server
        lines = log.read_text()
    assert "Traceback" not in lines, lines


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1"
