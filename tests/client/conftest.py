"""A server for each test to talk to."""

import pytest

from tests.client.fake_server import FakeServer, serving


@pytest.fixture(scope="module")
def running():
    with serving(FakeServer()) as server:  # half a second to start and stop
        yield server


@pytest.fixture
def server(running):
    running.forget()
    return running
