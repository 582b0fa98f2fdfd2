from dataclasses import dataclass, field

import pytest

from configs.sum_digits import tiny
from rl.config.effect import EFFECT, all_of, conditions_of, idle_fields, only_if, unless
from rl.config.tree import rebuild, walk


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
    share: float = field(default=0.5, metadata=all_of(only_if("enable", True), unless("inner.size", 1, 2)))
    name: str = field(default="", metadata=only_if("later.kind", "deep"))
    several: tuple[Inner, ...] = ()


def idle(config):
    return {found.path: found.why for found in idle_fields(config)}


def test_a_component_without_effect_is_named_alone_and_its_fields_are_not():
    assert idle(Outer()) == {"inner": "every=0", "share": "inner.size=1", "name": "later.kind=None"}
    assert idle(Outer(every=3)) == {
        "inner.depth": "inner.kind='plain'",
        "share": "inner.size=1",
        "name": "later.kind=None",
    }


def test_all_conditions_must_hold_and_the_first_that_does_not_is_the_reason():
    config = Outer(every=3, inner=Inner(size=3, kind="deep"), later=Inner(kind="deep"))
    assert idle(config) == {}
    assert idle(rebuild(config, {"enable": False})) == {"share": "enable=False"}
    assert idle(rebuild(config, {"inner.size": 2})) == {"share": "inner.size=2"}


def test_elements_of_a_list_are_named_by_their_number():
    config = Outer(every=1, inner=Inner(size=3, kind="deep"), later=Inner(kind="deep"), several=(Inner(),))
    assert idle(config) == {"several.0.depth": "several.0.kind='plain'"}


def declared():
    """Owner, field and condition of everything that a run's config says of itself."""
    config = tiny()
    seen = {type(config): config}
    for entry in walk(config):
        if entry.kind == "node" and not isinstance(entry.value, list | tuple):
            seen[type(entry.value)] = entry.value
    for cls, value in seen.items():
        for declared_field in value.__dataclass_fields__.values():
            for condition in conditions_of(declared_field):
                yield pytest.param(value, condition, id=f"{cls.__qualname__}.{declared_field.name}")


@pytest.mark.parametrize(("owner", "condition"), list(declared()))
def test_every_condition_of_a_run_names_a_field_that_is_there(owner, condition):
    value = owner
    for name in condition.field.split("."):
        value = getattr(value, name)
    assert condition.values


def test_metadata_of_an_effect_is_told_apart_from_other_metadata():
    assert set(only_if("a", 1)) == {EFFECT}
    assert conditions_of(field(default=0, metadata={"hidden": True})) == ()
