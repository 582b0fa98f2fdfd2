import sys

import pytest

from actors.plan import make_plan
from configs.sum_digits import tiny
from rl.config.tree import rebuild
from rl.observability.sinks.config import SinksConfig, TensorBoardConfig, check_sinks


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_sink_whose_package_is_missing_is_refused_before_the_start_with_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    config = tiny()
    getattr(config.sinks, name).enable = True
    with pytest.raises(
        ValueError, match=f"sinks.{name}.enable=True: the package {name} is not installed"
    ) as told:
        make_plan(config)
    assert "python tools/setup_env.py sinks" in str(told.value)


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    with pytest.raises(ValueError, match="the package tensorboard is not installed"):
        check_sinks(SinksConfig(tensorboard=TensorBoardConfig(enable=True)))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("console.num_rows", 0, "console: num_rows=0: must be at least 1"),
        ("write_s", 0.0, "write_s=0.0: must be above 0 and finite"),
        ("close_s", float("inf"), "close_s=inf: must be above 0 and finite"),
        ("wandb.project", "a/b", r"wandb: project='a/b': must be a name without / \\ # \? % or :"),
        ("trackio.project", "", "trackio: project='': must be a name"),
        (
            "console.style",
            "loud",
            "console: style='loud': must be 'auto' | 'lines' | 'off'".replace("|", r"\|"),
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_is_valid(path, value, says):
    with pytest.raises(ValueError, match=says):
        rebuild(SinksConfig(), {path: value})
