"""One server process for all tests that need a running server."""

import pytest

from tests.support.tinker_server import server_process

CHUNK_DATA = 3
"""Data per request of the shared server, small enough that the client splits larger batches."""


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    storage = tmp_path_factory.mktemp("tinker") / "storage"
    with server_process(storage, "--limits.chunk_data", str(CHUNK_DATA)) as process:
        yield process


@pytest.fixture
def client(server):
    """Official client with a session of its own."""
    service_client = server.client()
    yield service_client
    service_client.close("success").result(30)
