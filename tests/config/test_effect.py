from dataclasses import dataclass, field
from functools import reduce

from configs.sum_digits import tiny
from rl.config.configurable import EFFECT, all_of, idle_options, only_if, unless
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


def test_options_without_effect_are_listed_and_components_without_their_fields():
    assert list(idle_options(Outer())) == ["inner", "share", "name"]
    assert list(idle_options(Outer(every=3))) == ["inner.depth", "share", "name"]
    config = Outer(every=3, inner=Inner(size=3, kind="deep"), later=Inner(kind="deep"))
    assert list(idle_options(config)) == []
    assert list(idle_options(rebuild(config, {"enable": False}))) == ["share"]
    assert list(idle_options(rebuild(config, {"inner.size": 2}))) == ["share"]
    assert list(idle_options(rebuild(config, {"several": (Inner(),)}))) == ["several.0.depth"]


def test_every_condition_of_a_run_names_an_existing_field_and_values():
    config = tiny()
    owners = [config, *(entry.value for entry in walk(config) if entry.kind == "node")]
    for owner in owners:
        for declared in getattr(owner, "__dataclass_fields__", {}).values():
            for path, values, _ in declared.metadata.get(EFFECT, ()):
                reduce(getattr, path.split("."), owner)
                assert values
