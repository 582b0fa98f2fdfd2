"""The configs of servers: complete, their own, and on the command line."""

import pytest

from configs import tinker
from rl.config.cli import parse_cli
from rl.config.registry import ResolvedRun, registry_functions
from rl.config.serialize import read_json, write_json
from rl.tinker.backend import Backend

CONFIGS = sorted(registry_functions(tinker))


def test_there_is_one_that_needs_nothing():
    assert "tiny" in CONFIGS
    assert tinker.tiny().host == "127.0.0.1"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_survives_its_json_and_is_made_anew_by_each_call(name, tmp_path):
    first, second = (registry_functions(tinker)[name]() for _ in range(2))
    path = tmp_path / "config.json"
    write_json(ResolvedRun(module="tinker", function=name, config=first), path)

    assert read_json(path).config == first == second
    assert first.backend is not second.backend


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_makes_a_backend_of_what_the_command_line_says(name):
    argv = ["--config", name, "--port", "0", "--backend.cache", "elsewhere", "--limits.models", "3"]
    run = parse_cli(argv, default_module="tinker")
    backend: Backend = run.config.backend.build()

    assert (run.config.port, run.config.limits.models) == (0, 3)
    assert backend.config.cache == "elsewhere"  # type: ignore[attr-defined]
    assert list(backend.base_models) == []  # nothing is loaded before it starts
