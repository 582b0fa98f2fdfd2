import pytest

import rl.tinker as tinker
from tests.support.bigram_backend import NAME, BigramBackend


@pytest.fixture
def backend():
    return BigramBackend()


@pytest.fixture
def service(backend, tmp_path):
    client = tinker.ServiceClient(backend=backend, storage_folder=tmp_path / "storage")
    yield client
    client.close("success").result(timeout=10)


@pytest.fixture
def training(service):
    return service.create_lora_training_client(NAME, rank=4).result(timeout=10)
