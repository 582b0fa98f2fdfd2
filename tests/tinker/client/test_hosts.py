"""A backend is given, built of its config, or named."""

import pytest

from configs import tinker as configs
from rl.config.tree import ConfigError
from rl.tinker.client.hosts import make_backend
from rl.tinker.local.backend import LocalBackend
from tests.support.bigram_backend import BigramBackend


def test_a_backend_is_itself():
    backend = BigramBackend()
    assert make_backend(backend) is backend


@pytest.mark.parametrize("given", ["tiny", configs.tiny(), configs.tiny().backend])
def test_a_name_a_servers_config_and_its_backends_config_are_the_same_backend(given):
    backend = make_backend(given)
    assert isinstance(backend, LocalBackend)
    assert [base.name for base in backend.config.bases] == ["tiny"]


def test_an_unknown_name_lists_the_others():
    with pytest.raises(ConfigError, match=r"tiny_of_another_kind: not a config of tinker; there are: .*tiny"):
        make_backend("tiny_of_another_kind")
