import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from rl.config.configurable import Configurable
from tests.config.example_configs import Optimizer, SgdOptimizer, Trainer


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


def test_build_constructs_the_owner_with_config_and_runtime_arguments():
    counter = Counter.Config(values=[1]).build(start=5)
    assert type(counter) is Counter
    assert counter.start == 5
    assert counter.config == Counter.Config(values=[1, 5])


def test_build_never_shares_the_callers_config():
    config = Counter.Config(values=[1])
    config.build(start=5)
    assert config.values == [1]


def test_subclass_without_config_builds_itself_and_leaves_its_parent_alone():
    assert type(FreshCounter.Config(values=[1]).build()) is FreshCounter
    assert type(Counter.Config().build()) is Counter


def test_fresh_config_pickles_by_name():
    config = FreshCounter.Config(values=[7])
    assert pickle.loads(pickle.dumps(config)) == config


def test_subclass_config_builds_the_subclass():
    optimizer = SgdOptimizer.Config(lr=0.5, momentum=0.1).build(num_parameters=3)
    assert type(optimizer) is SgdOptimizer
    assert optimizer.config == SgdOptimizer.Config(lr=0.5, momentum=0.1)
    assert optimizer.num_parameters == 3


def test_config_refuses_positional_arguments_and_unknown_attributes():
    with pytest.raises(TypeError):
        Optimizer.Config(1e-3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Trainer.Config().learning_rate = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("decorator", [None, dataclass(kw_only=True), dataclass(slots=True)])
def test_config_without_keywords_and_slots_is_refused_by_name(decorator):
    config: Any = type("Config", (Optimizer.Config,), {"__annotations__": {"lr": float}, "lr": 1.0})
    with pytest.raises(
        TypeError, match=r"Wrong\.Config must be decorated with @dataclass\(kw_only=True, slots"
    ):
        type("Wrong", (Optimizer,), {"Config": config if decorator is None else decorator(config)})


def test_config_that_does_not_derive_from_the_parents_is_refused():
    with pytest.raises(TypeError, match=r"Stray\.Config must derive from Optimizer\.Config"):

        class Stray(Optimizer):
            @dataclass(kw_only=True, slots=True)
            class Config(Configurable.Config):
                lr: float = 1.0


def test_config_must_derive_from_every_configurable_parent():
    with pytest.raises(TypeError, match=r"Both\.Config must derive from Counter\.Config"):

        class Both(Optimizer, Counter):  # type: ignore[misc]
            @dataclass(kw_only=True, slots=True)
            class Config(Optimizer.Config):
                pass


def test_config_of_another_class_is_refused():
    with pytest.raises(TypeError, match=r"Borrower\.Config already builds Optimizer"):

        class Borrower(Configurable):
            Config = Optimizer.Config

    assert Optimizer.Config.owner is Optimizer
