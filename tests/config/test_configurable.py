import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from rl.config.configurable import Configurable
from tests.config.example_configs import Optimizer, SgdOptimizer


class Counter(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        values: list[int] = field(default_factory=list)

    def __init__(self, *, config: Config, start: int = 0) -> None:
        self.config = config
        self.start = start
        config.values.append(start)


class FreshCounter(Counter):
    pass


def test_build_constructs_the_owner_with_a_copy_of_the_config():
    config = Counter.Config(values=[1])
    counter = config.build(start=5)
    assert type(counter) is Counter
    assert (counter.start, counter.config) == (5, Counter.Config(values=[1, 5]))
    assert config.values == [1]


def test_subclass_without_config_builds_itself_and_leaves_its_parent_alone():
    config = FreshCounter.Config(values=[7])
    assert type(config.build()) is FreshCounter
    assert type(Counter.Config().build()) is Counter
    assert pickle.loads(pickle.dumps(config)) == config


class Stray(Configurable.Config):
    pass


def undecorated() -> Any:
    return type("Config", (Optimizer.Config,), {"__annotations__": {"lr": float}, "lr": 1.0})


DECORATED = r"Wrong\.Config must be decorated with @dataclass\(kw_only=True, slots"


@pytest.mark.parametrize(
    ("parents", "config", "says"),
    [
        ((Optimizer,), undecorated(), DECORATED),
        ((Optimizer,), dataclass(kw_only=True)(undecorated()), DECORATED),
        ((Optimizer,), dataclass(slots=True)(undecorated()), DECORATED),
        ((Optimizer,), Stray, r"Wrong\.Config must derive from Optimizer\.Config"),
        ((Optimizer, Counter), SgdOptimizer.Config, r"Wrong\.Config must derive from Counter\.Config"),
        ((Configurable,), Optimizer.Config, r"Wrong\.Config already builds Optimizer"),
    ],
)
def test_config_that_does_not_belong_to_the_class_is_refused(parents, config, says):
    with pytest.raises(TypeError, match=says):
        type("Wrong", parents, {"Config": config})
    assert Optimizer.Config.owner is Optimizer
