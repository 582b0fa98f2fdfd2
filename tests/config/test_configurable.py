import pickle
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pytest

from configs.sum_digits import tiny
from rl.config.configurable import EFFECT, Configurable, all_of, find_idle_options, only_if, unless
from rl.config.tree import ConfigError, rebuild, walk
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


def test_build_leaves_the_config_alone_whatever_its_post_init_does():
    class Appender(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            values: list[int] = field(default_factory=list)

            def __post_init__(self) -> None:
                self.values.append(1)

        def __init__(self, *, config: Config) -> None: ...

    config = Appender.Config()
    config.build()
    assert config.values == [1]  # of its own construction


def test_another_class_takes_over_the_fields():
    class Momentum(SgdOptimizer):
        @dataclass(kw_only=True, slots=True)
        class Config(SgdOptimizer.Config):
            decay: float = 0.9

    given = SgdOptimizer.Config(lr=0.5)
    taken = given.with_class(Momentum)
    assert (type(taken), taken.lr, taken.decay) == (Momentum.Config, 0.5, 0.9)
    assert type(taken.build()) is Momentum
    with pytest.raises(
        ConfigError, match=r"Counter has no fields .*lr.*: must be a class whose Config has all of"
    ):
        given.with_class(Counter)


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
        (
            (Optimizer, Counter),
            SgdOptimizer.Config,
            r"Wrong\.Config must derive from Counter\.Config",
        ),
        ((Configurable,), Optimizer.Config, r"Wrong\.Config already builds Optimizer"),
    ],
)
def test_config_that_does_not_belong_to_the_class_is_refused(parents, config, says):
    with pytest.raises(TypeError, match=says):
        type("Wrong", parents, {"Config": config})
    assert Optimizer.Config.owner is Optimizer


# Options without effect


@dataclass(kw_only=True)
class Inner:
    size: int = 1
    kind: str = "plain"
    depth: int = field(default=2, metadata=only_if("kind", "deep"))


@dataclass(kw_only=True)
class Outer:
    every: int = 0
    enable: bool = True
    inner: Inner = field(default_factory=Inner, metadata=unless("every", 0))
    later: Inner | None = None
    share: float = field(
        default=0.5, metadata=all_of(only_if("enable", True), unless("inner.size", 1, 2))
    )
    name: str = field(default="", metadata=only_if("later.kind", "deep"))
    several: tuple[Inner, ...] = ()


def test_options_without_effect_are_listed_and_components_without_their_fields():
    assert list(find_idle_options(Outer())) == ["inner", "share", "name"]
    assert list(find_idle_options(Outer(every=3))) == ["inner.depth", "share", "name"]
    config = Outer(every=3, inner=Inner(size=3, kind="deep"), later=Inner(kind="deep"))
    assert list(find_idle_options(config)) == []
    assert list(find_idle_options(rebuild(config, {"enable": False}))) == ["share"]
    assert list(find_idle_options(rebuild(config, {"inner.size": 2}))) == ["share"]
    assert list(find_idle_options(rebuild(config, {"several": (Inner(),)}))) == ["several.0.depth"]


def test_every_condition_of_a_run_names_an_existing_field_and_values():
    config = tiny()
    owners = [config, *(entry.value for entry in walk(config) if entry.kind == "node")]
    for owner in owners:
        for declared in getattr(owner, "__dataclass_fields__", {}).values():
            for path, values, _ in declared.metadata.get(EFFECT, ()):
                reduce(getattr, path.split("."), owner)
                assert values
