"""A server for each test to load: the one that clients talk to."""

from tests.client.conftest import running, server

__all__ = ["running", "server"]
