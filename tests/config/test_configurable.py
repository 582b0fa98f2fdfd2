import dataclasses
import pickle
import sys
from dataclasses import KW_ONLY, dataclass, field

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


def test_config_without_slots_is_refused_by_name():
    with pytest.raises(TypeError, match=r"NoSlots\.Config has no slots"):

        class NoSlots(Configurable):
            @dataclass(kw_only=True)
            class Config(Configurable.Config):
                lr: float = 1.0


def test_positional_config_is_refused_by_name_and_field():
    with pytest.raises(TypeError, match=r"Positional\.Config\.lr is positional"):

        class Positional(Configurable):
            @dataclass(slots=True)
            class Config(Configurable.Config):
                lr: float = 1.0


def test_positional_config_that_only_changes_an_inherited_default_is_refused():
    with pytest.raises(TypeError, match=r"Redeclared\.Config\.lr is positional"):

        class Redeclared(Optimizer):
            @dataclass(slots=True)
            class Config(Optimizer.Config):
                lr: float = 1.0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="3.11 does not record the decorator's arguments")
def test_positional_config_without_fields_of_its_own_is_refused():
    with pytest.raises(TypeError, match=r"NoFields\.Config is not keyword-only"):

        class NoFields(Optimizer):
            @dataclass(slots=True)
            class Config(Optimizer.Config):
                pass


def test_keyword_only_marker_of_the_parents_fields_does_not_excuse_missing_slots():
    with pytest.raises(TypeError, match=r"Marked\.Config has no slots"):

        class Marked(Configurable):
            @dataclass
            class Config(Configurable.Config):
                _: KW_ONLY
                lr: float = 1.0


def test_plain_class_config_is_refused_by_name():
    with pytest.raises(TypeError, match=r"Plain\.Config is not a dataclass"):

        class Plain(Configurable):
            class Config(Configurable.Config):
                lr = 1.0


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


def test_borrowed_config_is_refused_and_keeps_its_owner():
    with pytest.raises(TypeError, match=r"Borrower\.Config already builds Optimizer"):

        class Borrower(Configurable):
            Config = Optimizer.Config

    assert Optimizer.Config.owner is Optimizer


def test_owner_is_no_field():
    assert [f.name for f in dataclasses.fields(FreshCounter.Config)] == ["values"]
